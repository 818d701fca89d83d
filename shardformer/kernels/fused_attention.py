"""Causal attention by the kernel that comes with the hardware: Pallas' FlashAttention on a TPU, cuDNN's on a GPU.

Which one is a matter of the mesh's devices: a program that names both would need the libraries of both.
"""

import contextlib
import functools
import math
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardformer.kernels.blockwise_attention import ATTENDED

NEEDS_MULTIPLE = 128  # of tokens, on a TPU: the least block of its kernel
AMPERE, HOPPER = 8.0, 9.0  # compute capabilities
_one_at_a_time = threading.RLock()


class Hardware(NamedTuple):
    """What the choice of a kernel depends on."""

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
    """Why there is no kernel for such attention on these devices, or nothing."""
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
    return f"there is no kernel for {platform} devices"


def attend_by_kernel(platform: str, q_BThK, k_BThK, v_BThK, documents_BT=None):
    """Weighted values_BThK of causal attention."""
    if platform == "gpu":
        return _attend_on_gpu(q_BThK, k_BThK, v_BThK)
    heads_first = lambda x: jnp.swapaxes(x, 1, 2)
    return heads_first(_attend_on_tpu(*map(heads_first, (q_BThK, k_BThK, v_BThK)), documents_BT))


def _differentiate(attend, q, k, v):
    """The values and their derivative, which keeps what the kernel's forward pass found under the name that says so to
    `jax.checkpoint`: a rule that keeps values alone would run the kernel again for the rest.
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
    with _outputs_that_vary_like(q_BhTK) as kernel:
        return _call(kernel, q_BhTK, k_BhTK, v_BhTK, documents_BT)


def _forward(q, k, v, documents):
    with _outputs_that_vary_like(q) as kernel:
        return _differentiate(lambda q, k, v: _call(kernel, q, k, v, documents), q, k, v)


def _backward(pull_back, d_values):
    with _outputs_that_vary_like(d_values):
        return *pull_back(d_values), None


_attend_on_tpu.defvjp(_forward, _backward)


def _call(kernel, q, k, v, documents):
    T, K = q.shape[2:]
    size = next(size for size in (512, 256, NEEDS_MULTIPLE) if T % size == 0)
    names = [name for name in kernel.BlockSizes.__dataclass_fields__ if name != "block_b"]
    sizes = kernel.BlockSizes(block_b=1, **dict.fromkeys(names, size))
    segments = None if documents is None else kernel.SegmentIds(documents, documents)
    return kernel.flash_attention(
        q, k, v, segment_ids=segments, causal=True, sm_scale=1 / math.sqrt(K), block_sizes=sizes
    )


@contextlib.contextmanager
def _outputs_that_vary_like(x):
    """JAX's kernel, which does not say over which mesh axes its outputs differ, as shard_map's checks ask: `x`'s do."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    with _one_at_a_time:
        kernel.jax = _JaxWithTypedShapes(jax.typeof(x).manual_axis_type)
        try:
            yield kernel
        finally:
            kernel.jax = jax


class _JaxWithTypedShapes:
    """The module `jax`, whose ShapeDtypeStruct adds a manual axis type where none is given."""

    def __init__(self, manual_axis_type):
        class ShapeDtypeStruct(jax.ShapeDtypeStruct):
            def __init__(self, shape, dtype, **options):
                super().__init__(shape, dtype, **{"manual_axis_type": manual_axis_type} | options)

            @staticmethod
            def like(x):
                return ShapeDtypeStruct(x.shape, x.dtype)

        self.ShapeDtypeStruct = ShapeDtypeStruct

    def __getattr__(self, name):
        return getattr(jax, name)
