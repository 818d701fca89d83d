"""Activations times a weight matrix, with a backward pass whose products are oriented as hardware wants them.

JAX's own transpose rule gives the weights' gradient as (dy^T x)^T. XLA on the CPU computes that through a transposing
copy of dy with its producers, at three times the price of the product.
"""

import jax
from jax import Array, lax

from shardformer.kernels.gradient_pieces import split_columns


@jax.custom_vjp
def linear(x_BTI: Array, w_IO: Array) -> Array:
    """Returns x @ w in their common dtype.

    To be differentiated, both must vary over the same mesh axes. So a forgotten `axes.fan_out` is an error here, while
    a plain product would silently all-reduce its own gradient.
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
    """Copies x first: the CPU's fast product takes no transposed left operand. The barrier keeps XLA from undoing it.

    One product took 1.08 ms with the barrier, 1.83 ms without.
    """
    return lax.optimization_barrier(x_NI.T) @ dy_NO


def _product_in_pieces(x_NI, dy_NO):
    pieces = split_columns(dy_NO, x_NI.shape[1] * dy_NO.shape[1])
    return lax.concatenate([x_NI.T @ dy_No for dy_No in pieces], 1)


linear.defvjp(_forward, _backward)
