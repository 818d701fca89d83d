"""Causal attention by the kernel that comes with the hardware: Pallas' FlashAttention on a TPU, cuDNN's on a GPU.

Which one is a matter of the mesh's devices: a program that names both would need the libraries of both.
"""

import contextlib
import math
import threading

import jax
import jax.numpy as jnp

NEEDS_MULTIPLE = 128  # of tokens, on a TPU: the least block of its kernel
_one_at_a_time = threading.RLock()


def find_obstacle(platform: str, tokens: int, head_size: int, dtype: str, documents: bool) -> str:
    """Why there is no kernel for such attention on these devices, or nothing."""
    if platform == "tpu":
        if tokens % NEEDS_MULTIPLE:
            return f"a TPU's kernel takes a multiple of {NEEDS_MULTIPLE} tokens, got {tokens}"
        if head_size > 128 and head_size % 128:
            return f"a TPU's kernel takes heads of at most 128 or a multiple of it, got {head_size}"
        return ""
    if platform == "gpu":
        if dtype != "bfloat16":
            return f"cuDNN's kernel takes dtype=bfloat16, got {dtype}"
        if head_size % 8 or head_size > 128:
            return f"cuDNN's kernel takes heads of a multiple of 8 up to 128, got {head_size}"
        return "cuDNN's kernel does not stop where documents do" if documents else ""
    return f"there is no kernel for {platform} devices"


def attend_by_kernel(platform: str, q_BThK, k_BThK, v_BThK, documents_BT=None):
    """Weighted values_BThK of causal attention."""
    if platform == "gpu":
        return jax.nn.dot_product_attention(q_BThK, k_BThK, v_BThK, is_causal=True, implementation="cudnn")
    heads_first = lambda x: jnp.swapaxes(x, 1, 2)
    return heads_first(_attend_on_tpu(*map(heads_first, (q_BThK, k_BThK, v_BThK)), documents_BT))


@jax.custom_vjp
def _attend_on_tpu(q_BhTK, k_BhTK, v_BhTK, documents_BT):
    with _outputs_that_vary_like(q_BhTK) as kernel:
        return _call(kernel, q_BhTK, k_BhTK, v_BhTK, documents_BT)


def _forward(q, k, v, documents):
    with _outputs_that_vary_like(q) as kernel:
        return jax.vjp(lambda q, k, v: _call(kernel, q, k, v, documents), q, k, v)


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
