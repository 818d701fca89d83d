"""The choices of layers with experts, with their reasons: the grouped product, and the groups of a scan."""

from shardformer.config import Config
from shardformer.devices.chips import Hardware
from shardformer.kernels.grouped_kernel import Kernel
from shardformer.kernels.grouped_product import Blocks, GroupedProduct
from shardformer.tables import format_count

BLOCKS = 8, 256  # the fewest and the most rows of a block
TILES = 128, 512  # of a tile of the kernel


def choose_grouped_product(config: Config, hardware: Hardware) -> tuple[GroupedProduct, str]:
    """Returns the grouped product of these devices, and why."""
    if hardware.platform == "tpu":
        return Kernel(_choose_rows(config, *TILES)), "the kernel of MegaBlox reads groups of any size on tpu"
    # On a GPU, jaxlib 0.10 materialises an operand of all experts, and 0.12 in the backward pass (openxla/xla#40189).
    return Blocks(_choose_rows(config, *BLOCKS)), f"ragged_dot is a dense product on {hardware.platform}"


def choose_for_rows(product: GroupedProduct) -> GroupedProduct:
    """Returns the product of generation's first pass, which vmaps rows."""
    return product._replace(joins_rows=True)


def choose_for_tokens(product: GroupedProduct) -> GroupedProduct:
    """Returns the product of one token of each row: an expert has few, which a large block would fill up with zeros."""
    if isinstance(product, Kernel):
        return product._replace(joins_rows=True, tile=TILES[0])
    return product._replace(joins_rows=True, block=BLOCKS[0])


def _choose_rows(config: Config, fewest: int, most: int) -> int:
    """Returns about a quarter of an expert's mean rows: padding then adds an eighth of the work."""
    pairs = config.microbatch_rows * config.model.seq // config.parallel.cp * config.experts.experts_per_token
    while fewest < most and 8 * fewest <= pairs // config.experts.experts:
        fewest *= 2
    return fewest


def choose_groups(config: Config, types: int) -> tuple[int, int, str]:
    """Returns (first, period, reason) of layers of which only some have experts: groups of layers that repeat."""
    is_sparse = config.sparse_layers[: config.stage_layers]
    first, period = find_groups(is_sparse, types)
    repeats = (len(is_sparse) - first) // period
    reason = f"experts in some layers: {format_count(first, 'layer')} unrolled, then a scan of "
    return first, period, reason + f"{format_count(repeats, 'group')} of {format_count(period, 'layer')}"


def find_groups(types: tuple[bool, ...], multiple: int) -> tuple[int, int]:
    """Returns (first, period) with the smallest sum: from layer `first` on, types repeat after `period` layers.

    The period is a multiple of `multiple`, and at most the number of layers after the first ones.
    """
    count = len(types)
    for total in range(1, count + 1):
        for first in range(total):
            period = total - first
            if period % multiple == 0 and types[first + period :] == types[first : count - period]:
                return first, period
    return 0, count
