"""The limits of a device's attention kernel, and the rows and the result of a choice of attention."""

import dataclasses
from typing import NamedTuple

from jax import Array

from shardformer.config import Config
from shardformer.devices.chips import Hardware
from shardformer.errors import UsageError
from shardformer.kernels.attention import TPU_BLOCK, Attention, AttentionOptions
from shardformer.tables import format_count

AMPERE, HOPPER = 8.0, 9.0  # compute capabilities


class Rows(NamedTuple):
    """The rows that attention is chosen for."""

    tokens: int  # of one shard
    dropout: bool = False
    documents: bool = False

    @classmethod
    def of_training(cls, config: Config) -> "Rows":
        dropout, documents = bool(config.training.dropout), config.data.documents == "masked"
        return cls(config.model.seq // config.parallel.cp, dropout, documents)


class Choice(NamedTuple):
    """An attention method, and why."""

    attention: Attention
    reason: str


@dataclasses.dataclass(frozen=True)
class NoKernel(Attention):
    """attention=fused for devices without a kernel that computes it."""

    message: str = ""

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        raise UsageError(self.message)


class Demands(NamedTuple):
    """The properties of attention that not every kernel has."""

    tokens: int
    head_size: int
    dtype: str
    documents: bool = False
    cap: float | None = None


def reason_against(hardware: Hardware, demands: Demands) -> str:
    """Returns why these devices have no kernel for this attention, or ''."""
    platform, capability, *_ = hardware
    tokens, head_size, dtype, documents, cap = demands
    if platform == "tpu":
        from shardformer.kernels.typed_pallas import SPLASH, has_kernel  # not imported for other devices

        if not has_kernel(SPLASH):
            return "this JAX has no splash attention"
        if tokens % TPU_BLOCK:
            return f"a TPU's kernel takes a multiple of {TPU_BLOCK} tokens, got {tokens}"
        if head_size > 128 and head_size % 128:
            return f"a TPU's kernel takes heads of at most 128 or a multiple of it, got {head_size}"
        return ""
    if platform == "gpu":
        if capability < AMPERE:
            return f"cuDNN's kernel takes NVIDIA's GPUs of compute capability {AMPERE} or more, got {capability}"
        if dtype != "bfloat16":
            return f"cuDNN's kernel takes dtype=bfloat16, got {dtype}"
        largest = 256 if capability >= HOPPER else 128
        if head_size % 8 or head_size > largest:
            return f"cuDNN's kernel takes heads of a multiple of 8 up to {largest} here, got {head_size}"
        if cap:
            return "cuDNN's kernel takes no attention_cap"
        return "cuDNN's kernel does not stop where documents do" if documents else ""
    return f"{platform} devices have no kernel"


def reason_against_kernel(config: Config, hardware: Hardware, rows: Rows) -> str:
    """Returns why these devices have no kernel for the attention of this model, or ''."""
    model, dtype = config.model, config.parallel.dtype
    demands = Demands(rows.tokens, model.head_size, dtype, rows.documents, model.attention_cap)
    if reason := reason_against(hardware, demands):
        return reason
    if rows.dropout:
        return "no kernel takes dropout"
    if model.biased_by_distance:
        return f"no kernel takes the bias of positions={model.positions}"
    for name in ("sinks", "window_chunks"):
        if getattr(model, name):
            return f"no kernel takes {name}"
    if model.kv_latent:
        return "no kernel takes values of another size than keys, as kv_latent has"
    if config.parallel.pp > 1 and config.stage_layers % model.window_period:
        stages = f"window_pattern={model.window_pattern} in stages of {format_count(config.stage_layers, 'layer')}"
        return f"no kernel takes {stages}, which must be a multiple of the pattern's {model.window_period}"
    return ""
