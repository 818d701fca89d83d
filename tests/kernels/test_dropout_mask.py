"""Masks of dropout against jax.random.bernoulli, in full and in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.kernels.dropout_mask import keep_mask

ROWS, COLUMNS = np.arange(4), np.arange(6)
KEYS = jax.random.split(jax.random.key(3), (2, 3))


def masks(rate, rows=ROWS, columns=COLUMNS):
    key_data = jax.random.key_data(KEYS)
    return np.asarray(keep_mask(key_data, rate, jnp.asarray(rows), jnp.asarray(columns), len(COLUMNS)))


def bernoulli(rate):
    return np.array([[jax.random.bernoulli(key, 1 - rate, (4, 6)) for key in row] for row in KEYS])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_are_those_of_bernoulli(rate):
    np.testing.assert_array_equal(masks(rate), bernoulli(rate))


def test_a_number_equal_to_the_share_is_dropped():
    drawn = float(jax.random.uniform(KEYS[1, 2], (4, 6))[2, 5])
    assert not masks(1 - drawn)[1, 2, 2, 5]
    np.testing.assert_array_equal(masks(1 - drawn), bernoulli(1 - drawn))


def test_part_of_a_mask_is_cut_from_the_full_one():
    part = masks(0.5, rows=ROWS[[3, 1]], columns=COLUMNS[2:5])
    np.testing.assert_array_equal(part, masks(0.5)[..., [3, 1], 2:5])
