"""Keys of the form in which a model's frozen weights are stored, with their rules and the split of the stored parts."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from shardformer.config.keys import KeyGroup, key, require
from shardformer.config.names import BLOCKS, CODES, EXPERT_MATRICES, is_stacked

if TYPE_CHECKING:
    from shardformer.config.config import Config

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

    def check_sizes(self, c: "Config") -> None:
        """Rejects 4-bit codes of matrices with an odd number of inputs on a device: a byte has two."""
        if not self.has_groups:
            return
        mp = 1 if c.parallel.mesh == "auto" else c.parallel.mp
        local = {"d_model": c.model.d_model, "heads x head size": c.model.attention_size // mp}
        local |= c.mixture.local_widths(mp)
        local |= {name: size for name in ("q_latent", "kv_latent") if (size := c.get(name))}
        odd = [f"{name} {size}" for name, size in local.items() if size % 2]
        require(
            not odd,
            f"weights={self.weights} stores two inputs in a byte, and each device of mesh={c.parallel.mesh} has an odd "
            f"number of {', '.join(odd)}; give weights=int8{' or less mp' if mp > 1 else ''}",
        )

    def splits_groups(self, matrix: str, c: "Config") -> bool:
        """Returns whether each shard of the model has full groups of a matrix's inputs; else it has all scales."""
        inputs = c.split_inputs(matrix)
        return not inputs or inputs // c.parallel.mp % group_size(inputs) == 0

    def split_part(self, matrix: str, part: str, axes: tuple, c: "Config") -> tuple:
        """Returns the mesh axes of a part's dimensions, from those of the matrix of this full name.

        Scales are of its columns or groups, or of the rows of the token table. Each shard reads all scales of scales.
        """
        if part == CODES:
            return axes
        if part == BLOCKS:
            return axes[:-2]
        module, _, leaf = matrix.rpartition("/")
        dimensions = 4 if leaf in EXPERT_MATRICES else 3 if is_stacked(module) else 2
        of_scales = [*axes, None, None, None][:dimensions]
        if not (self.has_groups and is_stacked(module) and self.splits_groups(leaf, c)):
            of_scales[-1 if matrix.endswith("/tokens") else -2] = None
        return tuple(of_scales)
