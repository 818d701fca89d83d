"""The choices of layers with experts, with their reasons: the grouped product, and the groups of a scan."""

from shardformer.config import Config
from shardformer.kernels.fused_attention import Hardware
from shardformer.kernels.grouped_product import Blocks, GroupedProduct, Ragged
from shardformer.layout.choose_layers import Loop

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


def choose_groups(config: Config, loop: Loop, reason: str) -> tuple[Loop, str]:
    """Returns the loop over layers of which only some have experts: a scan over groups of layers that repeat."""
    is_sparse = config.sparse_layers[: config.stage_layers]
    first, period = find_groups(is_sparse, loop.types)
    if loop.scan:
        repeats = (len(is_sparse) - first) // period
        reason = f"experts in some layers: {first} layers unrolled, then a scan of {repeats} groups of {period} layers"
    return loop._replace(first=first, period=period), reason


def find_groups(kinds: tuple[bool, ...], multiple: int) -> tuple[int, int]:
    """Returns (first, period) with the smallest sum: from layer `first` on, kinds repeat after `period` layers.

    The period is a multiple of `multiple`, and at most the number of layers after the first ones.
    """
    count = len(kinds)
    for total in range(1, count + 1):
        for first in range(total):
            period = total - first
            if period % multiple == 0 and kinds[first + period :] == kinds[first : count - period]:
                return first, period
    return 0, count
