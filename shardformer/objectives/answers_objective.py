"""The objective of sampled answers."""

from typing import TYPE_CHECKING

from shardformer.config.keys import next_multiple, require
from shardformer.config.registries import names_code
from shardformer.objectives.objective import OneProgram

if TYPE_CHECKING:
    from shardformer.config.config import Config


class SampledAnswers(OneProgram):
    """Answers that the model samples, and their rewards: objective=grpo, dr_grpo, gspo, rloo."""

    task = "shardformer.objectives.policy_model:PolicyModel"
    host_feature = "shardformer.objectives.rollouts:RolloutsOfRun"
    takes_reward = True
    evaluation_titles = "mean reward", "above 0", "answers"

    def __init__(self, config: "Config"):
        super().__init__(config)
        self.answers_of_a_prompt, self.steps_of_a_batch = self.keys.group_size, self.keys.rollout_steps
        self.row_layout = {"answer_tokens": self.keys.answer_tokens}
        # Each answer weighs the same, whatever its number of tokens; else each token.
        by_answer = self.name == "grpo" and self.keys.token_mean == "answer"
        self.weighs_answers = by_answer or self.name in ("gspo", "rloo")

    @property
    def has_bound_of_bytes(self) -> bool:  # type: ignore[override]
        """True if no reward model scores the answers: the bound does not count its parameters."""
        reward = self.config.start.reward
        return reward in ("", "match") or reward.startswith("length:") or names_code(reward)

    def show_loss(self, loss: float) -> float:
        return 0 - loss  # no -0.0

    def check(self) -> None:
        super().check()
        c, size, batch = self.config, self.keys.group_size, self.config.training.batch
        require(
            batch % size == 0,
            f"batch={batch} answers do not divide into groups of group_size={size}; try "
            f"batch={next_multiple(batch, size)}",
        )
        require(
            self.keys.answer_tokens <= c.model.seq,
            f"answer_tokens={self.keys.answer_tokens} leave no room for a prompt in seq={c.model.seq}; give a larger "
            "seq",
        )
        require(
            not (c.training.dropout or c.lora.lora_dropout),
            f"objective={self.name} compares with a sampler that drops nothing: give dropout=0 and lora_dropout=0; got "
            f"dropout={c.training.dropout} lora_dropout={c.lora.lora_dropout}",
        )
        require(
            c.data.documents != "masked",
            f"objective={self.name} has one prompt in a row, got documents=masked; give documents=padded",
        )
        self.check_stages("samples tokens one by one, for which all stages would wait")

    def separate_documents(self, is_chat: bool) -> dict:
        return {"documents": "padded", "mask_prompt": not is_chat}  # a prompt in each row

    def as_language_model(self) -> "Config":
        return self.config.replace(objective="lm", reward="")
