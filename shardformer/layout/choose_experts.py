"""The choice of the grouped product of experts, with its reason: the hardware's, or blocks of rows on a CPU."""

from shardformer.config import Config
from shardformer.kernels.fused_attention import Hardware
from shardformer.kernels.grouped_product import Blocks, GroupedProduct, Ragged

LARGEST, SMALLEST = 256, 8  # rows of a block


def choose_grouped_product(config: Config, hardware: Hardware) -> tuple[GroupedProduct, str]:
    """Returns the grouped product of these devices, and why."""
    if hardware.platform != "cpu":
        return Ragged(), f"ragged_dot computes group by group on {hardware.platform}"
    return Blocks(_choose_block(config)), "ragged_dot is a dense product on cpu"


def _choose_block(config: Config) -> int:
    """Returns about a quarter of an expert's mean rows: padding then adds an eighth of the work."""
    rows = config.training.batch // config.parallel.dp // max(config.training.accum, 1)
    pairs = rows * config.model.seq // config.parallel.cp * config.experts.experts_per_token
    block = SMALLEST
    while block < LARGEST and 8 * block <= pairs // config.experts.experts:
        block *= 2
    return block
