"""Keys of the form in which a model's matrices are stored, or for which they are trained, with their rules."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from shardformer.config.keys import KeyGroup, UsedIf, key, require

if TYPE_CHECKING:
    from shardformer.config.config import Config

MEANING = (
    "matrices and token tables on the devices; int8: a quarter of float32's bytes, with a float32 scale for each "
    "output channel; int4: two inputs in a byte, with a bfloat16 scale for each 64 inputs, and int8 tables; nf4: as "
    "int4, with the codes and double quantisation of QLoRA; norms, biases, positions and adapters stay float"
)
OF_A_RUN = f"{MEANING}; auto: as the run stores them"


@dataclasses.dataclass(frozen=True)
class WeightKeys(KeyGroup):
    """Quantised weights, for generation, scores, evaluation, and training of adapters over them (QLoRA)"""

    weights: Literal["float", "int8", "int4", "nf4"] = key("float", MEANING, fixed=True)
    quantize_aware: Literal["none", "int8", "int4", "nf4"] = key(
        "none", "train weights for this form of weights=: every product has their rounded values, and the gradient "
        "there updates float32 masters", fixed=True,
    )  # fmt: skip
    quantize_after: int | None = key(
        None, "steps in float before quantize_aware= rounds what products read; auto: three quarters of the run",
        least=0, used_if=UsedIf(lambda keys: keys.quantize_aware != "none", "without quantize_aware="),
    )  # fmt: skip

    @property
    def quantized(self) -> bool:
        return self.weights != "float"

    def check_trainable(self, c: "Config") -> None:
        """Rejects codes without adapters, which have no gradient, and what training has only for float weights."""
        if not self.quantized:
            return
        require(
            c.lora.lora_rank,
            f"weights={self.weights} has no gradient: give lora_rank to train adapters over these weights, or "
            "weights=float",
        )
        require(
            c.optimizer.param_dtype == "float32",
            f"weights={self.weights} stores matrices as codes, got param_dtype={c.optimizer.param_dtype}; give "
            "param_dtype=float32",
        )

    def check_forms(self, c: "Config") -> None:
        """Rejects forms that a model's sizes, or other keys, do not allow."""
        if self.quantized or self.quantize_aware != "none":
            from shardformer.quantized import part_keys  # not imported for float weights

            part_keys.check_forms(c)
