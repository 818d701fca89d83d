"""The roofline of a step: arithmetic, memory traffic and wire traffic at a chip's peak rates."""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardformer.analysis.program_collectives import Collective, wire_bytes
from shardformer.analysis.wire_time import KERNEL_PASSES, KERNEL_SHARE
from shardformer.config import Config
from shardformer.config.names import AXES, CP, DP
from shardformer.devices.chips import Chip, Slice
from shardformer.layout import Layout
from shardformer.model import flops
from shardformer.parallel.pipeline import count_ticks
from shardformer.parallel.replicas import Replicated, Zero

# The forecast is fitted on the published and compiled steps of tests/analysis/test_forecast.py: products at a share of
# the peak, attention by its kernel, then the part of the traced memory traffic's seconds that no arithmetic hides.
PRODUCT_SHARE, SHARE_WITH_EXPERTS = {"tpu": 0.93, "gpu": 0.76}, 0.72
EXPOSED_TRAFFIC = {"tpu": 0.85, "gpu": 1.6}
FORECAST_ERROR = 0.11  # the root mean square of the logarithms of forecast / published


class Roofline(NamedTuple):
    """The seconds of one step that each resource takes at its peak rate.

    Compute, memory and overlapped wire traffic run side by side. Nothing runs next to the exposed wire traffic. Next to
    the copies from and to the host's memory, only the update runs, which takes little of their time.
    """

    compute: float
    memory: float
    overlapped_wire: float
    exposed_wire: float
    host_link: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.overlapped_wire) + self.exposed_wire + self.host_link

    @property
    def binding(self) -> str:
        """The resource that needs the most time, as text."""
        return max(self._fields, key=lambda name: getattr(self, name)).replace("_", " ")


def predict_times(
    layout: Layout, chips: Slice, traffic: int, collectives: Iterable[Collective], hosted: int = 0
) -> Roofline:
    """Predicts a step's seconds from the bytes that a device reads and writes and from its collectives.

    hosted: bytes that come from the host's memory and go back; both directions run side by side.
    """
    config = layout.config
    tokens = config.training.batch * config.model.seq
    compute = tokens * _timed_flops_per_token(layout) / (config.parallel.devices * chips.chip.flops)
    wire = {True: 0.0, False: 0.0}
    for each in collectives:
        axes = each.over(config.parallel.mesh_shape)
        wire[_overlaps(each, axes, layout.replicas)] += (
            each.times * wire_bytes(each) / axis_bandwidth(axes, config, chips)
        )
    memory, link = traffic / chips.chip.bandwidth, hosted / chips.chip.host_link
    return Roofline(compute, memory, wire[True], wire[False], link)


def forecast_seconds(times: Roofline, config: Config, chips: Slice) -> float:
    """Returns the seconds that a step is expected to take; `FORECAST_ERROR` is the typical error."""
    share = SHARE_WITH_EXPERTS if config.experts.experts else PRODUCT_SHARE[chips.platform]
    attention, kernels = _attention_seconds(config, chips)
    working = (times.compute - attention) / share + kernels + EXPOSED_TRAFFIC[chips.platform] * times.memory
    return max(working, times.memory, times.overlapped_wire) + times.exposed_wire + times.host_link


def _attention_seconds(config: Config, chips: Slice) -> tuple[float, float]:
    """Returns the seconds of a step's attention at the peak, and those of its kernels.

    Heads that are narrower than a TPU's matrix unit leave a part of it idle.
    """
    if not config.objective.reads_tokens:
        return 0.0, 0.0
    tokens = config.training.batch * config.model.seq / config.parallel.devices
    one_pass = _waiting_factor(config) * flops.attention_flops(config) * tokens / chips.chip.flops
    recomputed = config.parallel.remat == "full"
    filled = min(config.model.head_size / chips.chip.matrix_side, 1) if chips.platform == "tpu" else 1
    return (3 + recomputed) * one_pass, (KERNEL_PASSES + recomputed) * one_pass / (KERNEL_SHARE * filled)


def _overlaps(collective: Collective, axes: str, replicas: Replicated) -> bool:
    """Returns whether XLA computes next to a collective over these mesh axes.

    libtpu 0.0.52 starts ZeRO's gathers within the layers early, the exchanges that scatter the layers' gradients, and
    the sends of a ring over the context. Its reduce-scatters and all-reduces have no separate start and end, so that
    the step waits for each. The trace, which is not of a TPU, has reduce-scatters instead of exchanges.
    """
    if collective.operation == "reduce-scatter":
        return isinstance(replicas, Zero) and replicas.scattering.exchange and axes == DP and collective.in_loop
    if collective.operation == "collective-permute":
        return axes == CP
    return collective.operation == "all-gather" and collective.in_loop and axes in (DP, f"{DP} {CP}")


def _timed_flops_per_token(layout: Layout) -> float:
    """Returns FLOPs with the layers' recomputation, and with a stage's waiting time as the FLOPs that it could do.

    Neither applies to the head: its forward pass is kept, and each stage computes its rows' loss outside the schedule.
    No gradient needs the products that only the residual stream reads, so remat=full does not compute them again.
    """
    config, layers = layout.config, 0.0
    if not config.objective.reads_tokens:
        return flops.flops_per_token(config)
    layers, forward = flops.layer_flops_per_token(config)
    rest = flops.flops_per_token(config) - layers
    if config.parallel.remat == "full":
        layers += forward - unread_flops_per_token(config)
    return rest + _waiting_factor(config) * layers


def unread_flops_per_token(config: Config) -> int:
    """Returns the forward FLOPs of the layers' products that only the residual stream reads: no gradient needs them."""
    model = config.model
    if model.post_norms or model.sum_norms:
        return 0
    of_hidden = model.ff_size * len(config.mixture.layers_of("down")) if config.mixture.has_dense_layers else 0
    of_heads = model.attention_size * model.layers if model.block.startswith("parallel") else 0
    return 2 * model.d_model * (of_hidden + of_heads)


def _waiting_factor(config: Config) -> float:
    """Returns the time of a stage over that of its work: 1 without stages."""
    accum, rounds = config.training.accum, config.parallel.pipeline_rounds
    return count_ticks(accum, config.parallel.pp, rounds) / (rounds * accum)


def axis_bandwidth(axes: str, config: Config, chips: Slice) -> float:
    """Returns bytes per second over these mesh axes.

    On a torus: the links in the dimensions that the axes take. Of GPUs: the switch of their host, or the network if an
    exchange leaves the host.
    """
    if chips.count == 1 or not axes:
        return chips.chip.wire
    if not chips.is_tpu:
        return _host_bandwidth(axes, config.parallel.mesh_shape, chips.chip)
    sizes = dict(zip(AXES, config.parallel.mesh_shape, strict=False))
    spanned = math.prod(sizes.get(axis, 1) for axis in axes.split())
    share = math.log(max(spanned, 2)) / math.log(max(chips.count, 2))
    used = math.ceil(share * chips.chip.dimensions - 1e-9)
    return chips.chip.wire * min(used, chips.chip.dimensions) / chips.chip.dimensions


def _host_bandwidth(axes: str, mesh_shape: tuple[int, ...], chip: Chip) -> float:
    sizes = dict(zip(AXES, mesh_shape, strict=False))
    together = _least_on_a_host(axes, mesh_shape, chip.host)
    if together == math.prod(sizes[axis] for axis in axes.split()):
        return chip.wire
    # Each GPU of a host has a link to the network, and the rings of one exchange use the links of all its members.
    return min(chip.wire, together * chip.network)


@functools.cache
def _least_on_a_host(axes: str, mesh_shape: tuple[int, ...], host: int) -> int:
    """Returns the smallest number of devices of one exchange over these axes that share a host."""
    dp, mp, *between = mesh_shape
    places = np.arange(math.prod(mesh_shape)).reshape(dp, *between, mp)
    places = np.moveaxis(places, -1, 1)  # as mesh.arrange lays them out
    taken = [AXES.index(axis) for axis in axes.split()]
    size = math.prod(mesh_shape[dimension] for dimension in taken)
    groups = np.moveaxis(places // host, taken, range(-len(taken), 0)).reshape(-1, size)
    return min(int(np.unique(group, return_counts=True)[1].min()) for group in groups)
