"""Wide gradients in pieces of columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.kernels import gradient_pieces
from shardformer.kernels.gradient_pieces import ELEMENTS, split_columns


@pytest.mark.parametrize(
    ("rows", "columns", "widths"),
    [
        (4096, 4096, [4096]),
        (4096, 16384, [4096] * 4),
        (16384, 4096, [1024] * 4),
        (4096, 11008, [5504] * 2),
        (4096, 14336, [7168] * 2),  # thirds would end within a tile
        (4096, 50257, [50257]),
        (8, 128, [128]),
    ],
)
def test_pieces_are_whole_tiles_of_about_one_size(rows, columns, widths):
    x = jax.ShapeDtypeStruct((2, columns), jnp.float32)
    pieces = jax.eval_shape(lambda x: split_columns(x, rows * columns), x)
    assert [piece.shape[-1] for piece in pieces] == widths
    assert len(widths) == 1 or rows * widths[0] >= ELEMENTS


def test_pieces_follow_each_other():
    x = np.arange(2 * 512).reshape(2, 512)
    pieces = split_columns(jnp.asarray(x), 3 * gradient_pieces.ELEMENTS)
    assert len(pieces) == 2  # not three: 512 columns are four tiles
    np.testing.assert_array_equal(np.concatenate(pieces, 1), x)
