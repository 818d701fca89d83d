"""Keys of the scores and texts that a run makes of its model while it trains."""

import dataclasses

from shardformer.config.keys import KeyGroup, UsedIf, key, require


@dataclasses.dataclass(frozen=True)
class MonitorKeys(KeyGroup):
    """Scores while training"""

    eval_tasks: str = key("", "tasks of lm-evaluation-harness, separated by commas, scored into scores.jsonl")
    eval_include: str = key("", "folder of your own tasks (YAML)", needs="eval_tasks")
    eval_limit: float = key(0.0, "examples of each task, or below 1 their share; 0: all", least=0, needs="eval_tasks")
    eval_prompts: str = key("", "file with a prompt per line, continued greedily into texts.jsonl")
    eval_tokens: int = key(64, "tokens of each such continuation", least=1, needs="eval_prompts")
    score_every: int | None = key(
        None, "steps between these scores and texts, a multiple of eval_every; auto: eval_every", least=1,
        used_if=UsedIf(lambda c: c.eval_tasks or c.eval_prompts, "without eval_tasks or eval_prompts"),
    )  # fmt: skip

    def check(self) -> None:
        every = self.eval_every  # type: ignore[attr-defined]
        require(
            not self.score_every or self.score_every % every == 0,
            f"score_every={self.score_every} is not a multiple of eval_every={every}; the scores come with evaluations",
        )
