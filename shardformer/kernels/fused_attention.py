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

from shardformer.kernels.attention import ATTENDED, TPU_BLOCK, Attention, AttentionOptions
from shardformer.kernels.typed_pallas import typed_kernel


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
    return next(size for size in (512, 256, TPU_BLOCK) if tokens % size == 0)
