"""The objective of a model of rewards."""

from typing import TYPE_CHECKING

from shardformer.config.keys import format_value, keys_of, require
from shardformer.objectives.objective import Pairs

if TYPE_CHECKING:
    from shardformer.config.config import Config


class PairedRewards(Pairs):
    """A model that gives each answer a number, the larger one to the chosen answer of a pair: objective=reward."""

    task = "shardformer.objectives.reward_model:RewardModel"
    has_vocabulary = False
    trained = "a reward model"

    def __init__(self, config: "Config"):
        super().__init__(config)
        self.row_layout = {"marks_last": True}

    def check(self) -> None:
        super().check()
        c = self.config
        require(not c.training.z_loss, f"objective=reward has no logits, got z_loss={c.training.z_loss}; give z_loss=0")
        of_the_head = () if c.training.base else ("logits_scale", "logits_cap", "tied")  # a base has them for its own
        for name in ("loss_chunk", *of_the_head):
            field = keys_of(type(c))[name]
            require(
                c.get(name) == field.default,
                f"objective=reward has no logits, and {name} does nothing; give {name}="
                f"{format_value(field, field.default)}, got {name}={c.shown(name)}",
            )
        require(
            not c.lora.lora_rank,
            f"objective=reward trains a complete head, and lora_rank={c.lora.lora_rank} adapters only; give "
            "lora_rank=0",
        )
        require(
            not (c.start.eval_tasks or c.start.eval_prompts),
            "objective=reward trains a model that writes no text; leave out eval_tasks and eval_prompts",
        )
