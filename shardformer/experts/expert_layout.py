"""The layout of experts, with its reasons: the grouped product, the groups of a scan, and the split over the mesh."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.config.names import DP, MP, is_of_experts
from shardformer.devices.chips import Hardware
from shardformer.experts.grouped_product import Blocks, Copies, GroupedProduct, Kernel
from shardformer.kernels.typed_pallas import MEGABLOX, has_kernel
from shardformer.tables import format_count

if TYPE_CHECKING:
    from shardformer.layout import Layout

BLOCKS = 8, 256  # the fewest and the most rows of a block
TILES = 128, 512  # of a tile of the kernel
# Rows whose product with a matrix takes a GPU as long as the copies of the matrix: of an H200, with 0.6 PFLOP/s for the
# three products of a row and a number, and 4 TB/s for the 20 bytes that its copies read and write.
ROWS_OF_A_COPY = 512
BYTES = {"float32": 4, "bfloat16": 2}
BYTES_OF_CODES = {"int8": 1.0, "int4": 0.5, "nf4": 0.5}  # which ZeRO gathers as they are stored
# As `layout/specs.py` has them for other parameters, if mp divides the experts. Else their width is split.
RULES = (
    ("*/layers/router", P()),
    ("*/layers/router_bias", P()),
    ("*/layers/router_shift", P()),
    ("*/layers/expert_up", P(None, None, None, MP)),
    ("*/layers/expert_gate", P(None, None, None, MP)),
    ("*/layers/expert_down", P(None, None, MP, None)),
    ("*/layers/expert_up_bias", P(None, None, MP)),
    ("*/layers/expert_gate_bias", P(None, None, MP)),
    ("*/layers/expert_down_bias", P()),
    ("*/layers/shared_up", P(None, None, MP)),
    ("*/layers/shared_gate", P(None, None, MP)),
    ("*/layers/shared_down", P(None, MP, None)),
    ("*/layers/shared_scale", P()),
)


def add_experts(layout: "Layout") -> "Layout":
    """Returns the layout with the choices of its experts."""
    product, why = choose_grouped_product(layout.config, layout.hardware)
    axes = choose_expert_axes(layout.config)
    reasons = layout.reasons | {"experts": why, "expert_axes": axes.reason}
    return dataclasses.replace(layout, experts=product, expert_axes=axes.axes, reasons=reasons)


def layouts_of_generation(layout: "Layout", product: GroupedProduct) -> tuple["Layout", "Layout"]:
    """Returns the layouts of generation's first pass, which vmaps rows, and of one token of each row.

    Then an expert has few tokens, which a large block would fill up with padding.
    """
    if isinstance(product, Copies):  # a loop reads the matrices of chosen experts only
        product = Blocks(min(product.block, BLOCKS[1]))
    rows: GroupedProduct = product._replace(joins_rows=True)
    tokens = rows._replace(tile=TILES[0]) if isinstance(rows, Kernel) else rows._replace(block=BLOCKS[0])
    return dataclasses.replace(layout, experts=rows), dataclasses.replace(layout, experts=tokens)


def choose_grouped_product(config: Config, hardware: Hardware) -> tuple[GroupedProduct, str]:
    """Returns the grouped product of these devices, and why."""
    if hardware.platform == "tpu" and has_kernel(MEGABLOX):
        return Kernel(_choose_rows(config, *TILES)), "the kernel of MegaBlox reads groups of any size on tpu"
    if hardware.platform == "gpu":  # where ragged_dot materialises an operand of all experts (openxla/xla#40189)
        reason = "ragged_dot is a dense product on gpu, and a loop waits for the host"
        return Copies(_choose_copied_rows(config)), reason
    reason = f"ragged_dot is a dense product on {hardware.platform}"
    if hardware.platform == "tpu":
        reason = "this JAX has no kernel of MegaBlox"
    return Blocks(_choose_rows(config, *BLOCKS)), reason


def _choose_rows(config: Config, fewest: int, most: int) -> int:
    """Returns about a quarter of an expert's mean rows: padding then adds an eighth of the work."""
    while fewest < most and 8 * fewest <= _count_pairs(config) // config.experts.experts:
        fewest *= 2
    return fewest


def _choose_copied_rows(config: Config) -> int:
    """Returns the rows b of a block, a power of two, at which padding and copies together take the least time.

    Padding adds about b rows to the mean rows r of an expert, and its r / b + 1 blocks copy as many matrices.
    """
    best = math.sqrt(ROWS_OF_A_COPY * max(_count_pairs(config) / config.experts.experts, 1))
    return max(2 ** int(math.log2(best)), 16)


def _count_pairs(config: Config) -> int:
    """Returns the pairs of a token and a chosen expert that a shard computes at once."""
    return config.microbatch_rows * config.model.seq // config.parallel.cp * config.experts.experts_per_token


def choose_groups(config: Config, types: int) -> tuple[int, int, str]:
    """Returns (first, period, reason) of layers of which only some have experts: groups of layers that repeat."""
    is_sparse = config.mixture.sparse_layers[: config.stage_layers]
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


class ExpertAxes(NamedTuple):
    """The mesh axes over which experts are split, the slowest first, and why."""

    axes: tuple[str, ...]
    reason: str

    @property
    def over_dp(self) -> bool:
        """True if the shards of dp share the experts, and each expert gets the tokens of all of them."""
        return DP in self.axes


@functools.lru_cache
def choose_expert_axes(config: Config) -> ExpertAxes:
    """Returns the axes of a configuration whose mesh is known.

    Over dp, tokens are sent instead of matrices and their gradients. Each shard then needs room for the tokens of all
    shards, as all of them may choose its experts.
    """
    keys, p = config.experts, config.parallel
    if p.dp == 1 or keys.expert_axes == "mp" or keys.experts % (p.mp * p.dp):
        reason = "one shard of dp" if p.dp == 1 else (
            "expert_axes=mp" if keys.expert_axes == "mp" else f"experts={keys.experts} do not divide over {p.mp * p.dp}"
        )  # fmt: skip
        return ExpertAxes((MP,), reason)
    if keys.expert_axes == "dp":
        return ExpertAxes((MP, DP), "expert_axes=dp")
    tokens, matrices = _bytes_of_tokens(config), _bytes_of_matrices(config)
    sent = f"{tokens / 1e6:,.4g} MB of tokens a layer, {matrices / 1e6:,.4g} MB of matrices and gradients"
    rows, layer = _bytes_of_rows(config), _count_of_layer(config) * BYTES[p.dtype]
    room = f"room for {rows / 1e6:,.4g} MB of rows, {layer / 1e6:,.4g} MB of matrices"
    is_better = tokens < matrices and rows <= layer
    return ExpertAxes((MP, DP) if is_better else (MP,), f"{sent}; {room}")


def _count_of_layer(config: Config) -> int:
    """Returns the numbers of a layer's experts on one shard of mp."""
    matrices = 3 if config.model.gated else 2
    return matrices * config.experts.experts * config.model.d_model * config.mixture.expert_size // config.parallel.mp


def _bytes_of_matrices(config: Config) -> float:
    """Returns the bytes of a layer's experts that a device sends in a step: ZeRO's gathers, and gradients."""
    stored = BYTES_OF_CODES.get(config.stored.weights, BYTES[config.parallel.dtype])
    gathers = {0: 0, 1: 1, 3: 2}[config.parallel.zero] * stored
    gradients = 0 if config.lora.lora_rank else 4 if config.parallel.zero else 8  # an all-reduce sends each twice
    others = (config.parallel.dp - 1) / config.parallel.dp
    return _count_of_layer(config) * (gathers + gradients) * others


def _bytes_of_tokens(config: Config) -> float:
    """Returns the bytes of a layer's tokens that a device sends in a step: gathers, and scatters of sums."""
    p = config.parallel
    passes = 6 if p.remat == "full" else 4
    tokens = config.training.batch * config.model.seq / (p.dp * p.cp)
    return passes * (p.dp - 1) * tokens * config.model.d_model * BYTES[p.dtype]


def _bytes_of_rows(config: Config) -> float:
    """Returns the bytes of the rows of all shards' tokens, and of two hidden arrays, in a microbatch."""
    p = config.parallel
    tokens = config.training.batch * config.model.seq / (max(config.training.accum, 1) * p.cp)
    width = config.model.d_model + 2 * config.mixture.expert_size
    return tokens * config.experts.experts_per_token * width * BYTES[p.dtype]


def split_experts(name: str, spec: P, config: Config) -> P:
    """Returns the spec of a leaf of a layer, from that of its rule: a leaf of all experts may be split by expert."""
    if not (is_of_experts(name) and config.mixture.splits_experts):
        return spec
    axes = choose_expert_axes(config).axes
    inside = () if name.endswith("_bias") else (None, None)
    return P(None, axes if len(axes) > 1 else axes[0], *inside)
