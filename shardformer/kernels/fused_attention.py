"""Causal attention by the kernel that comes with the hardware: Pallas' FlashAttention on a TPU, cuDNN's on a GPU.

The mesh's devices decide which one: a program that names both would need the libraries of both.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardformer.kernels.blockwise_attention import ATTENDED
from shardformer.kernels.typed_pallas import typed_flash_attention

NEEDS_MULTIPLE = 128  # of tokens, on a TPU: the least block of its kernel
AMPERE, HOPPER = 8.0, 9.0  # compute capabilities


class Hardware(NamedTuple):
    """The properties of a device on which the choice of a kernel depends."""

    platform: str
    capability: float = 0.0  # compute capability of an NVIDIA GPU

    @classmethod
    def of_device(cls, device: jax.Device) -> "Hardware":
        try:
            capability = float(getattr(device, "compute_capability", 0))
        except ValueError:  # AMD's are names
            capability = 0.0
        return cls(device.platform, capability)


CPU = Hardware("cpu")


def find_obstacle(hardware: Hardware, tokens: int, head_size: int, dtype: str, documents: bool) -> str:
    """Returns why these devices have no kernel for such attention, or ''."""
    platform, capability = hardware
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
        return "cuDNN's kernel does not stop where documents do" if documents else ""
    return f"{platform} devices have no kernel"


def attend_by_kernel(
    platform: str, q_BThK: Array, k_BThK: Array, v_BThK: Array, documents_BT: Array | None = None
) -> Array:
    """Returns weighted values_BThK of causal attention."""
    if platform == "gpu":
        return _attend_on_gpu(q_BThK, k_BThK, v_BThK)
    q_BhTK, k_BhTK, v_BhTK = (jnp.swapaxes(x, 1, 2) for x in (q_BThK, k_BThK, v_BThK))
    return jnp.swapaxes(_attend_on_tpu(q_BhTK, k_BhTK, v_BhTK, documents_BT), 1, 2)


def _differentiate(attend: Callable, q, k, v):
    """Returns the values and their derivative.

    The derivative keeps all results of the kernel's forward pass under the name that `jax.checkpoint` keeps: a rule
    that keeps only the values would run the kernel again for the rest.
    """
    values, pull_back = jax.vjp(attend, q, k, v)
    named = checkpoint_name(values, ATTENDED)

    def name(kept):
        if kept is values:
            return named  # two names would keep it twice
        return kept if any(kept is x for x in (q, k, v)) else checkpoint_name(kept, ATTENDED)

    return named, jax.tree.map(name, pull_back)


def _call_cudnn(q_BThK, k_BThK, v_BThK):
    return jax.nn.dot_product_attention(q_BThK, k_BThK, v_BThK, is_causal=True, implementation="cudnn")


_attend_on_gpu = jax.custom_vjp(_call_cudnn)
_attend_on_gpu.defvjp(functools.partial(_differentiate, _call_cudnn), lambda pull_back, d_values: pull_back(d_values))


@jax.custom_vjp
def _attend_on_tpu(q_BhTK, k_BhTK, v_BhTK, documents_BT):
    with typed_flash_attention(q_BhTK) as kernel:
        return _call_pallas(kernel, q_BhTK, k_BhTK, v_BhTK, documents_BT)


def _forward(q, k, v, documents):
    with typed_flash_attention(q) as kernel:
        return _differentiate(lambda q, k, v: _call_pallas(kernel, q, k, v, documents), q, k, v)


def _backward(pull_back, d_values):
    with typed_flash_attention(d_values):
        return *pull_back(d_values), None


_attend_on_tpu.defvjp(_forward, _backward)


def _call_pallas(kernel, q, k, v, documents):
    T, K = q.shape[2:]
    size = next(size for size in (512, 256, NEEDS_MULTIPLE) if T % size == 0)
    names = [name for name in kernel.BlockSizes.__dataclass_fields__ if name != "block_b"]
    sizes = kernel.BlockSizes(block_b=1, **dict.fromkeys(names, size))
    segments = None if documents is None else kernel.SegmentIds(documents, documents)
    return kernel.flash_attention(
        q, k, v, segment_ids=segments, causal=True, sm_scale=1 / math.sqrt(K), block_sizes=sizes
    )
