"""The choice of data parallelism, with its reason: replicated parameters, ZeRO-1 or ZeRO-3, and their scattering."""

from typing import NamedTuple

from shardformer.config import Config
from shardformer.config.names import CP, DP, EXPERT_MATRICES, PP
from shardformer.devices.chips import Hardware
from shardformer.parallel.replicas import Replicated, Zero1, Zero3
from shardformer.parallel.scattering import Scattering

# Largest torus dimension where an exchange costs about as much link time as reduce-scatters in stages. A part crosses a
# quarter of its dimension on average.
EXCHANGED = 4


class ReplicasChoice(NamedTuple):
    """The replicas of data parallelism, and why."""

    replicas: Replicated
    reason: str


def choose_replicas(config: Config, hardware: Hardware, torus: tuple[int, ...]) -> ReplicasChoice:
    """Returns the replicas of a layout in which dp follows torus dimensions of these sizes."""
    layer_axes = tuple(axis for axis, size in ((DP, config.parallel.dp), (CP, config.parallel.cp)) if size > 1)
    outside_axes = layer_axes if config.parallel.pp == 1 else (*layer_axes, PP)
    shared: tuple[str, ...] = ()
    if config.experts.experts:
        from shardformer.experts.expert_layout import choose_expert_axes  # not imported without experts

        shared = EXPERT_MATRICES if choose_expert_axes(config).over_dp else ()
    axes = layer_axes, outside_axes, config.parallel.replicas * config.parallel.pp, shared
    if not config.parallel.zero or config.parallel.replicas == 1:
        return ReplicasChoice(
            Replicated(*axes), f"zero={config.parallel.zero}" if config.parallel.replicas > 1 else "one replica"
        )
    if config.parallel.zero == 1:  # gradients of all layers at once: too large to be exchanged
        zero: type[Zero1 | Zero3] = Zero1
        scattering = Scattering(torus)
    else:
        zero, scattering = Zero3, choose_scattering(torus, hardware, config.parallel.devices)
    reason = f"zero={config.parallel.zero}, gradients {_describe_scattering(scattering)}"
    return ReplicasChoice(zero(*axes, config.parallel.dtype, config.parallel.grad_dtype, scattering), reason)


def choose_scattering(stages: tuple[int, ...], hardware: Hardware, devices: int) -> Scattering:
    """Returns the scattering for a slice of so many devices, in which dp follows dimensions of these sizes."""
    is_tpu, is_short = hardware.platform == "tpu", 0 < max(stages, default=0) <= EXCHANGED
    can_exchange = is_tpu and devices <= (hardware.exchanging or devices)
    return Scattering(stages, is_short and can_exchange, in_pieces=is_tpu)


def _describe_scattering(scattering: Scattering) -> str:
    if scattering.exchange:
        return "of rows of layers exchanged, as the torus is short; others reduce-scattered"
    stages = len(scattering.stages)
    return f"reduce-scattered in {stages} stages, one for each dimension of the torus" if stages > 1 else (
        "reduce-scattered in one stage")  # fmt: skip
