"""Causal attention by the kernel that comes with the hardware: Pallas' on a TPU, cuDNN's on a GPU.

On a TPU it is splash attention. FlashAttention broadcasts its sums in memory before its backward pass, which needed 21M
of the 925M cycles of a step of GPT-J-6B (v5e:4x4, estimated by libtpu 0.0.52).
The mesh's devices decide which one: a program that names both would need the libraries of both.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardformer.kernels.attention import ATTENDED, Attention, AttentionOptions
from shardformer.kernels.typed_pallas import typed_kernel

NEEDS_MULTIPLE = 128  # of tokens, on a TPU: the least block of its kernels
AMPERE, HOPPER = 8.0, 9.0  # compute capabilities


class Hardware(NamedTuple):
    """The properties of a device on which choices of kernels and collectives depend."""

    platform: str
    capability: float = 0.0  # compute capability of an NVIDIA GPU
    flops: float = 0.0  # per second; 0: unknown
    wire: float = 0.0  # bytes per second over the links of one mesh axis; 0: unknown
    exchanging: int = 0  # TPUs of a slice up to which an all-to-all overlaps with arithmetic; 0: any number

    @classmethod
    def of_device(cls, device: jax.Device) -> "Hardware":
        try:
            capability = float(getattr(device, "compute_capability", 0))
        except ValueError:  # AMD's are names
            capability = 0.0
        return cls(device.platform, capability)


CPU = Hardware("cpu")


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
        if tokens % NEEDS_MULTIPLE:
            return f"a TPU's kernel takes a multiple of {NEEDS_MULTIPLE} tokens, got {tokens}"
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


class Range(NamedTuple):
    """The constants of one call."""

    window: int | None = None  # tokens in range, the query's included; None: all
    cap: float | None = None  # bound of the logits


EVERYTHING = Range()


@dataclasses.dataclass(frozen=True)
class Kernel(Attention):
    """The kernel of a platform's devices, on complete rows."""

    platform: str = "tpu"
    uses_kernel: ClassVar[bool] = True

    def __str__(self) -> str:
        return "fused"

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        T = q_BThK.shape[1]
        window = T if options.window is None else int(options.window)  # a kernel accepts no traced window
        bounds = Range(window if window < T else None, options.cap)
        return attend_by_kernel(self.platform, q_BThK, k_BSgK, v_BSgK, options.documents_BT, bounds)


def attend_by_kernel(
    platform: str,
    q_BThK: Array,
    k_BTgK: Array,
    v_BTgK: Array,
    documents_BT: Array | None = None,
    bounds: Range = EVERYTHING,
) -> Array:
    """Returns weighted values_BThK of causal attention; each of the g key/value heads serves h / g query heads."""
    if platform == "gpu":
        return _attend_on_gpu(q_BThK, k_BTgK, v_BTgK, bounds)
    q_BhTK, k_BgTK, v_BgTK = (jnp.swapaxes(x, 1, 2) for x in (q_BThK, k_BTgK, v_BTgK))
    q_BhTK = (q_BhTK.astype(jnp.float32) / math.sqrt(q_BhTK.shape[-1])).astype(q_BhTK.dtype)  # the kernel does not
    return jnp.swapaxes(_attend_on_tpu(q_BhTK, k_BgTK, v_BgTK, documents_BT, bounds), 1, 2)


def _differentiate(attend: Callable, q, k, v):
    """Returns the values and their derivative.

    The derivative keeps all results of the kernel's forward pass under the name that `jax.checkpoint` keeps: a rule
    that keeps only the values would rerun the kernel for the rest.
    """
    values, pull_back = jax.vjp(attend, q, k, v)
    named = checkpoint_name(values, ATTENDED)

    def name(saved):
        if saved is values:
            return named  # two names would keep it twice
        is_result = jnp.issubdtype(saved.dtype, jnp.floating) and not any(saved is x for x in (q, k, v))
        return checkpoint_name(saved, ATTENDED) if is_result else saved  # integers are masks, and documents

    return named, jax.tree.map(name, pull_back)


def _call_cudnn(q_BThK, k_BTgK, v_BTgK, bounds: Range):
    before = None if bounds.window is None else (bounds.window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BThK, k_BTgK, v_BTgK, is_causal=True, local_window_size=before, implementation="cudnn"
    )


def _forward_on_gpu(q, k, v, bounds):
    return _differentiate(functools.partial(_call_cudnn, bounds=bounds), q, k, v)


_attend_on_gpu = jax.custom_vjp(_call_cudnn, nondiff_argnums=(3,))
_attend_on_gpu.defvjp(_forward_on_gpu, lambda bounds, pull_back, d_values: pull_back(d_values))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_on_tpu(q_BhTK, k_BgTK, v_BgTK, documents_BT, bounds: Range):
    with typed_kernel(q_BhTK) as kernel:
        return _call_splash(kernel, q_BhTK, k_BgTK, v_BgTK, documents_BT, bounds)


def _forward(q, k, v, documents, bounds):
    with typed_kernel(q) as kernel:
        return _differentiate(lambda q, k, v: _call_splash(kernel, q, k, v, documents, bounds), q, k, v)


def _backward(bounds, pull_back, d_values):
    with typed_kernel(d_values):
        return *pull_back(d_values), None


_attend_on_tpu.defvjp(_forward, _backward)


def _call_splash(kernel, q, k, v, documents, bounds: Range):
    h, T = q.shape[1:3]
    before = None if bounds.window is None else bounds.window - 1
    splash = make_splash(kernel, kernel.mask_lib.LocalMask((T, T), (before, 0), 0), h, bounds.cap)
    if documents is None:
        return jax.vmap(splash)(q, k, v)
    return jax.vmap(splash)(q, k, v, kernel.SegmentIds(documents, documents))


def make_splash(kernel, mask, heads: int, cap: float | None, **options) -> Callable:
    """Returns splash attention of one example, in which all heads have this mask."""
    names = [name for name in kernel.BlockSizes.__dataclass_fields__ if name.startswith("block_")]
    return kernel.make_splash_mha_single_device(
        kernel.mask_lib.MultiHeadMask([mask] * heads),
        block_sizes=kernel.BlockSizes(**dict.fromkeys(names, _block_size(mask.shape[0]))),
        attn_logits_soft_cap=cap,
        **options,
    )


def _block_size(tokens: int) -> int:
    return next(size for size in (512, 256, NEEDS_MULTIPLE) if tokens % size == 0)
