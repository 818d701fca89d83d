"""How fast a step can be at best: arithmetic, memory traffic and wire traffic against a chip's peak rates."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from shardformer import flops, mesh
from shardformer.chips import Slice
from shardformer.config import Config
from shardformer.kernels.pipeline_schedule import count_ticks
from shardformer.report.collectives import Collective


class Roofline(NamedTuple):
    """Seconds of one step if each alone held it up; the largest binds."""

    compute: float
    memory: float
    wire: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def binding(self) -> str:
        return max(self._fields, key=lambda name: getattr(self, name))


def predict_times(config: Config, chips: Slice, traffic: int, found: Iterable[Collective]) -> Roofline:
    """`traffic`: bytes that a device reads from its memory and writes there; `found`: what it sends."""
    recomputed = 1.0
    if config.remat == "full":  # the forward pass runs again
        recomputed += flops.forward_flops_per_token(config) / flops.flops_per_token(config)
    waited = 1.0
    if config.pp > 1:  # the bubble of a pipeline
        work = config.pipeline_rounds * config.accum
        waited = count_ticks(config.accum, config.pp, config.pipeline_rounds) / work
    compute = config.batch * config.seq * recomputed * waited / flops.peak_tokens_per_second(config, chips.chip)
    wire = sum(c.count * wire_bytes(c) / axis_bandwidth(c.over(config.mesh_shape), config, chips) for c in found)
    return Roofline(compute, traffic / chips.chip.bandwidth, wire)


def wire_bytes(c: Collective) -> float:
    """What one device sends in a ring."""
    n = max(map(len, c.groups))
    sent = {
        "all-reduce": 2 * (n - 1) / n,
        "all-gather": (n - 1) / n,  # of the result
        "reduce-scatter": n - 1,  # the result is one part of n
        "all-to-all": (n - 1) / n,
        "collective-permute": 1,
    }
    return c.bytes * sent[c.operation] if n > 1 else 0.0


def axis_bandwidth(axes: str, config: Config, chips: Slice) -> float:
    """Bytes per second over these mesh axes: of a torus, the links in the dimensions that they take."""
    if not chips.is_tpu or chips.count == 1:
        return chips.chip.wire
    sizes = dict(zip(mesh.AXES, config.mesh_shape, strict=False))
    spanned = math.prod(sizes.get(axis, 1) for axis in axes.split())
    share = math.log(max(spanned, 2)) / math.log(max(chips.count, 2))
    used = math.ceil(share * chips.chip.dimensions - 1e-9)
    return chips.chip.wire * min(used, chips.chip.dimensions) / chips.chip.dimensions
