"""Activations times a weight matrix, and heads as an axis, with backward passes oriented as hardware wants them.

JAX's transpose rule gives the weights' gradient as (dy^T x)^T. XLA on the CPU computes that through a transposing
copy of dy with its producers, at three times the price of the product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

LANES = 128  # columns of a TPU's tile; it would copy a piece that ends within one
PIECE_ELEMENTS = 1 << 24  # of a piece, about: products of this size are as fast as larger ones


@jax.custom_vjp
def linear(x_BTI: Array, w_IO: Array) -> Array:
    """Returns x @ w in their common dtype.

    To be differentiated, both must vary over the same mesh axes. So a forgotten `collectives.fan_out` is an error here,
    while a plain product would silently all-reduce its gradient.
    """
    return x_BTI @ w_IO


def _forward(x_BTI, w_IO):
    return x_BTI @ w_IO, (x_BTI, w_IO)


def _backward(saved, dy_BTO):
    x_BTI, w_IO = saved
    x_NI, dy_NO = (a.reshape(-1, a.shape[-1]) for a in (x_BTI, dy_BTO))
    dw_IO = lax.platform_dependent(
        x_NI, dy_NO, cpu=_transposed_product_on_cpu, tpu=_product_in_pieces, default=lambda x, dy: x.T @ dy
    )
    return (dy_NO @ w_IO.T).reshape(x_BTI.shape), dw_IO


def _transposed_product_on_cpu(x_NI, dy_NO):
    """Copies x first: the CPU's fast product accepts no transposed left operand. The barrier keeps XLA from undoing it.

    One product needed 1.08 ms with the barrier, 1.83 ms without.
    """
    return lax.optimization_barrier(x_NI.T) @ dy_NO


def _product_in_pieces(x_NI, dy_NO):
    pieces = split_columns(dy_NO, x_NI.shape[1] * dy_NO.shape[1])
    return lax.concatenate([x_NI.T @ dy_No for dy_No in pieces], 1)


linear.defvjp(_forward, _backward)


def split_columns(x: Array, elements: int) -> list[Array]:
    """Splits x by columns into equal pieces, as many as `linear` computes a gradient of `elements` numbers in.

    A TPU sends one piece of a wide gradient while it computes the next. `linear` computes a gradient as a
    concatenation of products, and `scatter_sum` splits it in the same places. XLA drops the concatenation then. The
    scatter of a complete gradient could only start after the complete product.
    """
    columns = x.shape[-1]
    most = max(elements // PIECE_ELEMENTS, 1)
    count = next((n for n in range(most, 1, -1) if columns % (n * LANES) == 0), 1)
    return list(lax.split(x, (columns // count,) * count, x.ndim - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_heads(x_BTd: Array, heads: int) -> Array:
    """Returns x_BThK, as `reshape` does.

    A TPU's compiler transposes an array twice to reshape it, once back to where it was. If heads are whole tiles, it
    copies slices of them instead: gptj_6b with 8 rows on each chip of v5p:4x4x4 computes for 1.83 s a step, not 1.95.
    """
    return lax.platform_dependent(
        x_BTd, tpu=functools.partial(stack_slices, heads=heads), default=functools.partial(_reshape, heads=heads)
    )


def _reshape(x_BTd: Array, heads: int) -> Array:
    return x_BTd.reshape(*x_BTd.shape[:-1], heads, -1)


def stack_slices(x_BTd: Array, heads: int) -> Array:
    """Returns x_BThK of slices if each is whole tiles, else of a reshape."""
    if x_BTd.shape[-1] // heads % LANES:
        return _reshape(x_BTd, heads)
    return jnp.stack(jnp.split(x_BTd, heads, axis=-1), axis=-2)


def _forward_heads(x_BTd, heads):
    return split_heads(x_BTd, heads), None


def _backward_heads(heads, _, gradient_BThK):
    """Reshapes: products would be slower if they read the gradient as slices."""
    return (gradient_BThK.reshape(*gradient_BThK.shape[:-2], -1),)


split_heads.defvjp(_forward_heads, _backward_heads)
