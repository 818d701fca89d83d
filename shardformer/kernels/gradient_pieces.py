"""Wide gradients of weights in pieces of columns: a TPU sends one piece while it computes the next.

`linear` computes a gradient as a concatenation of products, and `scatter_sum` splits it in the same places. XLA drops
the concatenation then. The scatter of a whole gradient could only begin after the whole product, and the last one of a
layer would have nothing beside it.
"""

from jax import Array, lax

ELEMENTS = 1 << 24  # of a piece, about: products of this size are as fast as larger ones
TILE = 128  # columns; a TPU would copy a piece that ends within a tile


def split_columns(x: Array, elements: int) -> list[Array]:
    """Returns x in pieces of equally many columns, as a gradient of so many elements with these columns has them."""
    columns = x.shape[-1]
    most = max(elements // ELEMENTS, 1)
    count = next((n for n in range(most, 1, -1) if columns % (n * TILE) == 0), 1)
    return list(lax.split(x, (columns // count,) * count, x.ndim - 1))
