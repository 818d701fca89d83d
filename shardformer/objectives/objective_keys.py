"""Keys of the objective: pairs of a chosen and a rejected answer, a teacher's distributions, or sampled answers."""

import dataclasses
import functools
from typing import Literal

from shardformer.config.keys import KeyGroup, UsedIf, key, require
from shardformer.objectives.objective import choose_objective

WITH_PAIRS = UsedIf(
    lambda keys: keys.compares_likelihoods, "without pairs and their likelihoods; give objective=dpo or another of them"
)
WITH_REWARD_MODEL = UsedIf(lambda keys: keys.objective == "reward", "with another objective; give objective=reward")
WITH_MTP = UsedIf(lambda keys: keys.objective == "mtp", "with another objective; give objective=mtp")
WITH_TEACHER = UsedIf(lambda keys: keys.objective == "distill", "with another objective; give objective=distill")
WITH_BETA = UsedIf(
    lambda keys: keys.compares_likelihoods or choose_objective(keys.objective).takes_reward,
    "without pairs or rewards; give objective=dpo, grpo or another of them",
)
WITH_REWARDS = UsedIf(
    lambda keys: choose_objective(keys.objective).takes_reward, "with another objective; give objective=grpo"
)
WITH_GRPO = UsedIf(lambda keys: keys.objective == "grpo", "with another objective, which fixes it; give objective=grpo")
WITH_REUSED_ANSWERS = UsedIf(
    lambda keys: choose_objective(keys.objective).takes_reward and keys.rollout_steps > 1,
    "while a step learns from answers of its own weights, whose ratio is 1; give objective=grpo and rollout_steps=2 or "
    "more",
)
WITH_SFT_TERM = UsedIf(
    lambda keys: keys.has_sft_term, "without pairs and the loss of chosen answers; give objective=orpo, or sft_weight"
)
WITH_SMOOTHING = UsedIf(
    lambda keys: keys.objective in ("dpo", "simpo"),
    "with an objective that has no sigmoid of a margin; give dpo or simpo",
)
WITH_DPO = UsedIf(lambda keys: keys.objective == "dpo", "with another objective, which fixes it; give objective=dpo")
WITH_SIMPO = UsedIf(lambda keys: keys.objective == "simpo", "with another objective; give objective=simpo")


@dataclasses.dataclass(frozen=True)
class ObjectiveKeys(KeyGroup):
    """Objective"""

    objective: Literal[
        "lm", "mtp", "distill", "grpo", "dr_grpo", "gspo", "rloo", "reward", "dpo", "ipo", "kto", "orpo", "simpo",
        "task",
    ] = key(
        "lm",
        "loss; lm: of every token; mtp: and of the one after it; distill: of a teacher's distributions; grpo, dr_grpo, "
        "gspo, rloo: of sampled answers with rewards; task: that of task=; reward: of the numbers that a reward model "
        "gives to pairs; the others: of pairs of a chosen and a rejected answer (batch counts rows of pairs)",
        fixed=True,
    )  # fmt: skip
    beta: float = key(
        0.1, "scale of the rewards; ipo: its regularisation tau; orpo: weight of the odds ratio; grpo: that of the "
        "KL divergence from the start of the run, in the loss (rloo: in the rewards), 0: none", used_if=WITH_BETA,
    )  # fmt: skip
    label_smoothing: float = key(
        0.0, "probability that a pair is labelled the wrong way round", least=0, used_if=WITH_SMOOTHING
    )
    length_norm: bool = key(
        False, "divide each answer's log-ratio by its number of tokens; ipo, orpo and simpo always do", used_if=WITH_DPO
    )
    reward_gap: float = key(0.5, "gap between the rewards that is aimed at: SimPO's gamma", least=0, used_if=WITH_SIMPO)
    sft_weight: float | None = key(
        None, "weight of the chosen answers' loss per token, added; auto: 1 with orpo, else 0", least=0,
        used_if=WITH_PAIRS,
    )  # fmt: skip
    sft_tokens: Literal["answer", "all"] = key(
        "answer", "tokens of that loss; all: those of the prompts too, as TRL's ORPO", used_if=WITH_SFT_TERM
    )

    reward_center: float = key(
        0.0, "weight of the square of a pair's sum of rewards, which draws their mean to 0 (TRL's "
        "center_rewards_coefficient)", least=0, used_if=WITH_REWARD_MODEL,
    )  # fmt: skip

    mtp_weight: float = key(0.3, "weight of the loss of the token after the next", used_if=WITH_MTP)

    teacher: str = key(
        "", "run whose best weights are the teacher of objective=distill, or a Hugging Face folder, which `train` "
        "converts to the run OUT.teacher", fixed=True, used_if=WITH_TEACHER,
    )  # fmt: skip
    divergence: Literal["forward", "reverse"] = key(
        "forward", "KL divergence of each token; forward: of the student from the teacher, which covers all that the "
        "teacher does; reverse: of the teacher from the student", used_if=WITH_TEACHER,
    )  # fmt: skip
    distill_weight: float = key(
        1.0, "weight of the divergence; the rest is that of the data's tokens", least=0, used_if=WITH_TEACHER
    )
    distill_temperature: float = key(
        1.0, "divides the logits of both; the divergence is multiplied by its square", used_if=WITH_TEACHER
    )

    group_size: int = key(
        8, "answers that are sampled for each prompt and compared with each other; divides batch, which counts answers",
        least=2, fixed=True, used_if=WITH_REWARDS,
    )  # fmt: skip
    answer_tokens: int = key(64, "longest sampled answer", least=1, fixed=True, used_if=WITH_REWARDS)
    rollout_steps: int = key(1, "steps that learn from the same answers", least=1, fixed=True, used_if=WITH_REWARDS)
    rollout_top_k: int = key(0, "draw from the k likeliest tokens; 0: all", least=0, fixed=True, used_if=WITH_REWARDS)
    rollout_top_p: float = key(1.0, "draw from likeliest tokens of this probability", fixed=True, used_if=WITH_REWARDS)
    clip_ratio: float = key(
        0.2, "distance from 1 at which the ratio of a token's probability to the sampler's has no more effect; rloo: "
        "that of an answer; gspo: so too, as a mean of tokens, which is nearer to 1: its paper has 3e-4 to 4e-4",
        used_if=WITH_REUSED_ANSWERS,
    )  # fmt: skip
    token_mean: Literal["batch", "answer"] = key(
        "batch", "tokens that weigh the same; batch: all, as TRL's dapo; answer: those of an answer, and answers weigh "
        "the same, as TRL's grpo", fixed=True, used_if=WITH_GRPO,
    )  # fmt: skip

    @functools.cached_property
    def sft(self) -> float:
        """The weight of the SFT term."""
        return float(self.objective == "orpo") if self.sft_weight is None else self.sft_weight

    @functools.cached_property
    def has_sft_term(self) -> bool:
        return self.compares_likelihoods and self.sft > 0

    @functools.cached_property
    def compares_likelihoods(self) -> bool:
        """Returns whether the loss is of the log-probabilities of pairs."""
        objective = choose_objective(self.objective)
        return objective.reads_pairs and objective.has_vocabulary

    def check(self) -> None:
        of_pairs = choose_objective(self.objective).reads_pairs
        require(
            self.beta > 0 or (self.beta == 0 and not of_pairs),
            f"beta must be {'above' if of_pairs else 'at least'} 0, got {self.beta}; try beta=0.1",
        )
        require(0 < self.rollout_top_p <= 1, f"rollout_top_p must be in (0, 1], got {self.rollout_top_p}; try 0.95")
        require(0 < self.clip_ratio < 1, f"clip_ratio is a distance from 1 in (0, 1), got {self.clip_ratio}; try 0.2")
        require(
            self.label_smoothing < 0.5,
            f"label_smoothing is the probability of a wrong label, below 0.5, got {self.label_smoothing}",
        )
        require(
            self.teacher or self.objective != "distill",
            "objective=distill learns from a teacher; give the folder of its run or of Hugging Face: teacher=FOLDER",
        )
        require(self.distill_weight <= 1, f"distill_weight is a share, at most 1, got {self.distill_weight}")
        require(self.distill_temperature > 0, f"distill_temperature must be above 0, got {self.distill_temperature}")
