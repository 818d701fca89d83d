"""The choice of the mesh axes over which experts are split, with its reason: mp, or mp and dp."""

import functools
from typing import NamedTuple

from shardformer.config import Config
from shardformer.config.names import DP, MP

BYTES = {"float32": 4, "bfloat16": 2}
BYTES_OF_CODES = {"int8": 1.0, "int4": 0.5, "nf4": 0.5}  # which ZeRO gathers as they are stored


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
    return matrices * config.experts.experts * config.model.d_model * config.expert_size // config.parallel.mp


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
    width = config.model.d_model + 2 * config.expert_size
    return tokens * config.experts.experts_per_token * width * BYTES[p.dtype]
