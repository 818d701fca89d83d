"""The choices of a Layout of the layers and the loss: their loop, recomputation, stages, the loss chunk."""

from typing import TYPE_CHECKING, NamedTuple

from shardformer.config import Config
from shardformer.devices.chips import Hardware
from shardformer.kernels.attention import ATTENDED, ATTENTION_WEIGHTS, Attention
from shardformer.kernels.remat import PRODUCT, SUM, Remat
from shardformer.kernels.vocabulary_loss import tokens_at_once

if TYPE_CHECKING:
    from shardformer.parallel.pipeline import Pipeline


MOST_UNROLLED = 64  # layers that a GPU unrolls by itself; an H200's compiler takes 16 s for 12 of them, scanned or not


class Loop(NamedTuple):
    """The loop over a stage's layers."""

    scan: bool  # else unrolled
    types: int = 1  # layers in a step of the scan, if each layer of window_pattern has a separate kernel
    first: int = 0  # unrolled layers before the scan, if not all layers have experts
    period: int = 0  # layers after which those with experts repeat; 0: all layers have the same parameters


def choose_loss_chunk(config: Config, hardware: Hardware) -> tuple[int, str]:
    """Returns the tokens whose logits exist together, and why."""
    if config.parallel.loss_chunk:
        return config.parallel.loss_chunk, f"loss_chunk={config.parallel.loss_chunk}"
    chunk = tokens_at_once(config.model.padded_vocab // config.parallel.mp, hardware.platform)
    return chunk, f"logits of {chunk:,} tokens fit in a chunk on {hardware.platform}"


def choose_loop(config: Config, hardware: Hardware, attention: Attention) -> tuple[Loop, str]:
    """Returns how the layers of a stage run one after the other, and why."""
    scan, reason = _choose_scan(config, hardware)
    loop = Loop(scan)
    if attention.uses_kernel and config.model.window_period > 1:
        loop = Loop(scan, config.model.window_period)
        reason = "a kernel takes constant windows: one for each layer type"
    if config.mixture.mixes_layers:
        from shardformer.experts.expert_layout import choose_groups  # not imported without experts

        first, period, groups = choose_groups(config, loop.types)
        return loop._replace(first=first, period=period), groups if loop.scan else reason
    return loop, reason


def _choose_scan(config: Config, hardware: Hardware) -> tuple[bool, str]:
    """Returns whether the layers are scanned, and why."""
    p = config.parallel
    if p.scan is not None:
        return p.scan, f"scan={str(p.scan).lower()}"
    if hardware.platform != "gpu":
        return True, f"a scan compiles fast, and costs little on {hardware.platform}"
    if p.zero == 3 or p.pp > 1:
        return True, "a scan holds the gathered parameters of one layer" if p.zero == 3 else "a scan for each stage"
    if config.model.layers > MOST_UNROLLED:
        return True, f"more than {MOST_UNROLLED} layers compile for long if they are unrolled"
    return False, "a GPU copies each layer's arrays from and to those of a scan"


def choose_remat(config: Config, attention: Attention) -> tuple[Remat, str]:
    """Returns the activations that the backward pass recomputes, and why.

    remat=none keeps all activations. With zero=3 and with stages it keeps products, attention and sums over mp. It
    drops norms, rotary and activation functions, and the parameters that ZeRO gathers or that a stage uses for a
    round. Gathered parameters would be the full model on every device; a stage's would be stored once for each
    microbatch. Neither has a name. (With unrolled layers, XLA keeps both on a CPU nevertheless: it drops the
    barriers of `jax.checkpoint`.)
    """
    reason = f"remat={config.parallel.remat}"
    if config.parallel.remat == "attention" and not attention.uses_kernel:  # a kernel keeps no weights
        in_attention: tuple[str, ...] | None = (ATTENDED,)
    else:
        in_attention = None
    if config.parallel.remat == "full":
        return Remat(layer=(), attention=in_attention), reason
    if config.parallel.remat == "dots" or config.parallel.zero == 3 or config.parallel.pp > 1:
        weights = (ATTENTION_WEIGHTS,) if config.parallel.remat == "none" else ()
        if config.parallel.remat != "dots":
            dropped = "gathered parameters" if config.parallel.zero == 3 else "copies of a stage's parameters"
            reason = f"remat={config.parallel.remat} keeps products and sums over mp, not {dropped}"
        return Remat(layer=(PRODUCT, ATTENDED, SUM, *weights), attention=in_attention), reason
    return Remat(attention=in_attention), reason


def choose_pipeline(config: Config) -> tuple["Pipeline | None", str]:
    """Returns the schedule of the stages, and why."""
    if config.parallel.pp == 1:
        return None, "pp=1"
    from shardformer.parallel.pipeline import Pipeline  # not imported without stages

    return Pipeline(
        config.parallel.pp, config.training.accum // config.parallel.pp, config.parallel.pipeline_rounds
    ), f"pp={config.parallel.pp}"
