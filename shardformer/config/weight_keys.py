"""Keys of the form in which a model's frozen weights are stored."""

import dataclasses
from typing import Literal

from shardformer.config.keys import KeyGroup, key

MEANING = (
    "matrices and token tables on the devices; int8: a quarter of float32's bytes, with a float32 scale for each "
    "output channel; int4: two inputs in a byte, with a bfloat16 scale for each 64 inputs, and int8 tables; nf4: as "
    "int4, with the codes and double quantisation of QLoRA; norms, biases, positions and adapters stay float"
)
OF_A_RUN = f"{MEANING}; auto: as the run stores them"
GROUP = 64  # inputs that share a scale, at most


def group_size(inputs: int) -> int:
    """Returns how many inputs share a scale: the largest even divisor up to GROUP, because a byte has two inputs."""
    return next(size for size in range(min(GROUP, inputs) // 2 * 2, 0, -2) if inputs % size == 0)


@dataclasses.dataclass(frozen=True)
class WeightKeys(KeyGroup):
    """Quantised weights, for generation, scores, evaluation, and training of adapters over them (QLoRA)"""

    weights: Literal["float", "int8", "int4", "nf4"] = key("float", MEANING, fixed=True)

    @property
    def quantized(self) -> bool:
        return self.weights != "float"

    @property
    def has_groups(self) -> bool:
        """True if groups of a matrix's inputs share a scale."""
        return self.weights in ("int4", "nf4")
