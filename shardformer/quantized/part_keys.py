"""The parts of a quantised matrix: groups of inputs that share a scale, and the split of each part over the mesh."""

from typing import TYPE_CHECKING

from shardformer.config.keys import require
from shardformer.config.names import BLOCKS, CODES, EXPERT_MATRICES, is_stacked

if TYPE_CHECKING:
    from shardformer.config.config import Config

GROUP = 64  # inputs that share a scale, at most
WITH_GROUPS = ("int4", "nf4")  # forms in which groups of a matrix's inputs share a scale
TABLES = ("/embed/tokens", "/embed/previous")  # the ends of names of tables, of which each row has a scale


def group_size(inputs: int) -> int:
    """Returns how many inputs share a scale: the largest even divisor up to GROUP, because a byte has two inputs."""
    return next(size for size in range(min(GROUP, inputs) // 2 * 2, 0, -2) if inputs % size == 0)


def check_forms(c: "Config") -> None:
    """Rejects forms that a model's sizes, or other keys, do not allow."""
    _check_sizes("weights", c.stored.weights, c)
    _check_sizes("quantize_aware", c.stored.quantize_aware, c)
    if c.stored.quantize_aware != "none":
        _check_rounding(c)


def _check_rounding(c: "Config") -> None:
    form = f"quantize_aware={c.stored.quantize_aware}"
    require(
        not c.stored.quantized and not c.lora.lora_rank,
        f"{form} trains all weights, got weights={c.stored.weights} lora_rank={c.lora.lora_rank}, with which they are "
        "frozen; give weights=float and lora_rank=0, or quantize_aware=none",
    )
    require(
        c.optimizer.param_dtype == "float32" and c.optimizer.offload == "none" and not c.optimizer.searches_rate,
        f"{form} has masters of its own, and an update of one gradient: give param_dtype=float32, offload=none and an "
        "optimizer other than lbfgs",
    )
    after, last = c.stored.quantize_after or 0, c.training.steps
    require(
        c.training.epochs or after <= last,  # steps that are not yet counted are checked when they are
        f"quantize_after={after} is after the last step, steps={last}, so that no step is rounded; give at most {last}",
    )


def _check_sizes(key: str, form: str, c: "Config") -> None:
    """Rejects 4-bit codes of matrices with an odd number of inputs on a device: a byte has two.

    key: the key that names the form.
    """
    if form not in WITH_GROUPS:
        return
    mp = 1 if c.parallel.mesh == "auto" else c.parallel.mp
    local = {"d_model": c.model.d_model, "heads x head size": c.model.attention_size // mp}
    local |= c.mixture.local_widths(mp)
    local |= {name: size for name in ("q_latent", "kv_latent") if (size := c.get(name))}
    odd = [f"{name} {size}" for name, size in local.items() if size % 2]
    require(
        not odd,
        f"{key}={form} stores two inputs in a byte, and each device of mesh={c.parallel.mesh} has an odd number of "
        f"{', '.join(odd)}; give {key}=int8{' or less mp' if mp > 1 else ''}",
    )


def splits_groups(matrix: str, c: "Config") -> bool:
    """Returns whether each shard of the model has full groups of a matrix's inputs; else it has all scales."""
    inputs = c.split_inputs(matrix)
    return not inputs or inputs // c.parallel.mp % group_size(inputs) == 0


def split_part(matrix: str, part: str, axes: tuple, c: "Config") -> tuple:
    """Returns the mesh axes of a part's dimensions, from those of the matrix of this full name.

    Scales are of its columns or groups, or of the rows of tables. Each shard reads all scales of scales.
    """
    if part == CODES:
        return axes
    if part == BLOCKS:
        return axes[:-2]
    module, _, leaf = matrix.rpartition("/")
    dimensions = 4 if leaf in EXPERT_MATRICES else 3 if is_stacked(module) else len(axes)
    of_scales = [*axes, None, None, None][:dimensions]
    if not (c.stored.weights in WITH_GROUPS and is_stacked(module) and splits_groups(leaf, c)):
        of_scales[-1 if matrix.endswith(TABLES) else -2] = None
    return tuple(of_scales)
