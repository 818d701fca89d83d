"""The objectives of a run: `config.objective` answers what the rest of the program asks about it.

The class `Objective` is the language model that learns every token; the others override the answers that differ.
Nothing here imports JAX: `task` and `host_feature` name classes that are imported on use, so that a plain run has
neither pairs nor a teacher. README.md follows a batch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardformer.config.keys import require
from shardformer.errors import UsageError

if TYPE_CHECKING:
    from shardformer.config.config import Config


class Objective:
    """The language model and the loss of every token, objective=lm."""

    task = "shardformer.model.model:Model"  # the subclass of TaskOnMesh
    host_feature = ""  # the subclass of HostFeature; empty: nothing
    reads_tokens = True  # False: a row has arrays of its own
    has_vocabulary = True  # False: the model gives no distribution over tokens
    trained = "a language model"
    has_plain_batches = True  # tokens, targets and weights
    has_dense_reference = True  # the loss is that of analysis/dense_reference.py
    verified_against = "a plain dense model"
    has_bound_of_bytes = True  # the formula of analysis/needed_bytes.py is above the bytes of a step
    only_in_training: tuple[str, ...] = ()  # parts of a checkpoint that other uses leave out
    sides = 1  # rows that the model computes of one row of a batch
    reads_pairs = False  # the data are preference pairs
    answers_of_a_prompt = 1  # rows that are made of one row of the data
    steps_of_a_batch = 1  # steps that learn from the same row of the data
    takes_reward = False
    evaluation_titles = "nats/token", "accuracy", "tokens"  # of the loss, the accuracy and their count
    unit = "tokens"  # that the speed counts

    def __init__(self, config: "Config"):
        self.config, self.keys, self.name = config, config.preferences, config.preferences.objective
        self.row_tokens = config.model.seq  # by which the speed of a run is counted
        self.row_layout: dict = {}  # the fields of `RowLayout` that only this objective sets

    def show_loss(self, loss: float) -> float:
        """Returns the number that an evaluation prints of its loss."""
        return loss

    def check(self) -> None:
        """Raises UsageError for keys that this objective cannot have."""
        start = self.config.start
        require(
            not start.task,
            f"a task has a loss of its own, got objective={self.name}; leave out objective, or task",
        )
        require(
            not start.reward or self.takes_reward,
            f"reward does nothing with objective={self.name}; give objective=grpo",
        )

    def check_source(self, name: str, has_pairs: bool) -> None:
        """Raises UsageError for data of another kind than this objective reads."""
        if has_pairs and not self.reads_pairs:
            raise UsageError(
                f"data={name} holds preference pairs (chosen and rejected), and objective={self.name} learns texts; "
                "give objective=dpo"
            )
        if self.reads_pairs and not has_pairs:
            raise UsageError(
                f"objective={self.name} learns from preference pairs, and data={name} has none; give records with "
                "prompt, chosen and rejected, or objective=lm"
            )

    def separate_documents(self, is_chat: bool) -> dict:
        """Returns the keys that keep one conversation from seeing another."""
        return {"documents": "masked"} if is_chat and self.config.data.documents == "packed" else {}

    def as_language_model(self) -> "Config":
        """Returns the configuration of the same model for scores and samples, without what only training has."""
        return self.config

    def without_training_layers(self) -> "Config":
        """Returns the configuration without layers that only training has; it is evaluated as before."""
        return self.as_language_model() if self.only_in_training else self.config


class OneProgram(Objective):
    """An objective whose mean over all microbatches is found in one program."""

    has_plain_batches = has_dense_reference = False

    def check(self) -> None:
        super().check()
        c = self.config
        require(
            not c.optimizer.searches_rate and c.training.accum_mode == "scan" and not c.training.grad_metrics,
            f"objective={self.name} finds the mean over all microbatches in one program: give accum_mode=scan, "
            "grad_metrics=false and an optimizer other than lbfgs",
        )

    def check_stages(self, reason: str) -> None:
        mesh = self.config.parallel.mesh
        require(
            mesh == "auto" or self.config.parallel.pp == 1,
            f"objective={self.name} {reason}, got mesh={mesh}; give a mesh without pp",
        )


class Pairs(OneProgram):
    """Preference pairs of a chosen and a rejected answer: objective=dpo, ipo, kto, orpo, simpo."""

    task = "shardformer.objectives.preference_model:PreferenceModel"
    sides = 2
    reads_pairs = True

    def __init__(self, config: "Config"):
        super().__init__(config)
        self.needs_references = self.name in ("dpo", "ipo", "kto")  # compares with the model that training starts from
        self.measures_kl = self.name == "kto"  # the divergence from it, on answers to other prompts
        self.stored_references = 4 if self.measures_kl else 2  # of a pair: of its sides, and of those answers
        self.is_normed = self.keys.length_norm or self.name in ("ipo", "orpo", "simpo")  # by an answer's tokens
        if self.needs_references:
            self.host_feature = "shardformer.objectives.preference_references:PairReferences"
        self.evaluation_titles = f"{self.name} loss", "right order", "pairs"
        sft_tokens = self.keys.sft_tokens if self.keys.has_sft_term else ""
        self.row_layout = {"sft_tokens": sft_tokens, "measures_kl": self.measures_kl}

    def check(self) -> None:
        super().check()
        data = self.config.data
        require(
            not (data.mask_prompt or data.order == "random"),
            f"objective={self.name} reads complete pairs, whose prompts have no loss: give mask_prompt=false and "
            "order=epoch or file",
        )
        require(
            not (self.measures_kl and data.documents == "masked"),
            f"objective={self.name} compares each pair with the answers of another one, and has a pair in each row: "
            "give documents=padded",
        )

    def separate_documents(self, is_chat: bool) -> dict:
        return {"documents": "padded"} if is_chat and self.config.data.documents == "packed" else {}


OBJECTIVES = {  # FILE:CLASS of each, in this folder
    "lm": "objective:Objective", "distill": "distillation_objective:Distillation", "mtp": "mtp_objective:MultiToken",
    "reward": "reward_objective:PairedRewards", "task": "user_task_objective:UserTask",
    **dict.fromkeys(("grpo", "dr_grpo", "gspo", "rloo"), "answers_objective:SampledAnswers"),
    **dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo"), "objective:Pairs"),
}  # fmt: skip


def choose_objective(name: str) -> type[Objective]:
    """Returns the class of objective=name."""
    return import_class(f"shardformer.objectives.{OBJECTIVES[name]}")


def import_class(path: str) -> Any:
    """Returns the class MODULE:NAME."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
