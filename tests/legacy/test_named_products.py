"""xeinsum's own rules; its values against jax 0.4's are in test_programs.py."""

import numpy as np
import pytest

from shardformer.legacy import xmap
from shardformer.legacy.named_products import xeinsum

X = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


def mapped(spec, *operands):
    axes = tuple([["b", ...]] * len(operands))
    return xmap(lambda *rows: xeinsum(spec, *rows), axes, [...])(*operands)


def test_one_operand_takes_the_order_of_the_result():
    np.testing.assert_array_equal(mapped("ij{b}->ji", X), X.sum(0).T)
    np.testing.assert_array_equal(mapped("ij{b}->ij", X), X.sum(0))
    np.testing.assert_array_equal(mapped("ij{b}->j", X), X.sum((0, 1)))


@pytest.mark.parametrize(
    ("spec", "operands", "error", "words"),
    [
        ("ii{b}->i", 1, NotImplementedError, "a term of 'ii{b}->i' has an axis twice"),
        ("ij{b},jk{b,b}->ik", 2, NotImplementedError, "has an axis twice"),
        ("ij{b}", 1, ValueError, "write the result as well"),
        ("ij{b},ij{b}", 1, ValueError, "write the result as well"),
    ],
)
def test_what_it_does_not_know_is_refused(spec, operands, error, words):
    with pytest.raises(error, match=words):
        mapped(spec, *[X] * operands)
