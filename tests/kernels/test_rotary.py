"""Rotary positions: relative distances, the closed form, and the product that a TPU uses, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.kernels import rotary
from shardformer.kernels.rotary import rotate
from shardformer.shards.positions import find_rotation
from tests import asserts, sharded, shared

Q, K = sharded.normal(0, 1, 1, 2, 8), sharded.normal(1, 1, 1, 2, 8)


def run_exactly(function, *arguments):
    return exact.run(function, *arguments).outputs


def make_rotation(rotary_dims=8, **options):
    """Returns the function of x and the positions that rotates x."""
    frequency = find_rotation(shared.tiny(d_model=64, heads=8, rotary_dims=rotary_dims))
    return lambda x, positions: rotate(x, positions, frequency, **options)


def at(x, position, rotary_dims=8):
    return run_exactly(make_rotation(rotary_dims), x, np.int32([position]))[0, 0]


@pytest.mark.parametrize("rotary_dims", [8, 6, 2])
def test_dot_products_depend_only_on_the_distance(rotary_dims):
    def dots(query, key):
        return (at(Q, query, rotary_dims) * at(K, key, rotary_dims)).sum(-1)

    for query, key in [(3, 0), (10, 7), (503, 500)]:
        np.testing.assert_allclose(dots(query, key), dots(4, 1), rtol=1e-12)
    assert np.abs(dots(4, 1) - dots(4, 2)).max() > 0.1

    def one_sided(query, key):
        return (at(Q, query, rotary_dims) * K[0, 0]).sum(-1)

    assert np.abs(one_sided(3, 0) - one_sided(10, 7)).max() > 0.1


def test_each_pair_turns_by_its_own_frequency():
    angle = 5 * np.float64(np.float32(1) / np.float32(10000) ** (np.arange(0, 6, 2, dtype=np.float32) / 6))
    pairs = (Q[0, 0, :, 0:6:2] + 1j * Q[0, 0, :, 1:6:2]) * np.exp(1j * angle)
    expected = np.stack([pairs.real, pairs.imag], -1).reshape(2, 6)
    np.testing.assert_allclose(at(Q, 5, 6)[:, :6], expected, rtol=1e-14)


def test_compiled_rotation_is_the_exact_one():
    asserts.assert_compiled_is_exact(make_rotation(6), sharded.normal(2, 2, 3, 2, 8), np.arange(3, dtype=np.int32))


def test_factor_scales_the_rotated_dimensions():
    turn, positions = make_rotation(6, factor=1.5), np.int32([5])
    got = run_exactly(turn, Q, positions)[0, 0]
    np.testing.assert_allclose(got[:, :6], 1.5 * at(Q, 5, 6)[:, :6], rtol=1e-14)
    np.testing.assert_array_equal(got[:, 6:], Q[0, 0, :, 6:])

    def weigh(x, positions):
        return (turn(x, positions) * K).sum()

    expected = 1.5 * at(K, -5, 6)[:, :6]  # turned back, and scaled as well
    np.testing.assert_allclose(run_exactly(jax.grad(weigh), Q, positions)[0, 0, :, :6], expected, rtol=1e-14)


def test_other_dimensions_pass_unchanged():
    np.testing.assert_array_equal(at(Q, 5, 6)[:, 6:], Q[0, 0, :, 6:])
    np.testing.assert_array_equal(at(Q, 0, 8), Q[0, 0])
    assert (np.asarray(at(Q, 5, 8))[:, 6:] != Q[0, 0, :, 6:]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_and_slices_give_the_same_numbers(dtype):
    x = sharded.normal(2, 2, 3, 2, 8).astype(dtype)
    sin, cos = (sharded.normal(seed, 1, 3, 1, 3).astype(dtype) for seed in (3, 4))
    expected = rotary.rotate_by_slices(x, sin, cos)
    np.testing.assert_array_equal(rotary.rotate_by_product(x, sin, cos), expected)
    assert (np.asarray(rotary.rotate_by_product(x, -sin, cos)) != expected)[..., :6].all()


def test_gradient_of_rotation_equals_the_formula():
    x, weight = sharded.normal(2, 2, 3, 2, 8), sharded.normal(5, 2, 3, 2, 8)
    positions, frequency = (
        np.arange(3, dtype=np.int32),
        find_rotation(shared.tiny(d_model=64, heads=8, rotary_dims=6)),
    )
    turn = make_rotation(6)

    def weigh_plainly(x, positions):
        angle = positions.astype(jnp.float32)[:, None] * frequency[None]
        sin, cos = (f(angle)[None, :, None] for f in (jnp.sin, jnp.cos))
        return (rotary.rotate_by_slices(x, sin, cos) * weight).sum()

    def weigh(x, positions):
        return (turn(x, positions) * weight).sum()

    expected = run_exactly(jax.grad(weigh_plainly), x, positions)
    assert asserts.relative(run_exactly(jax.grad(weigh), x, positions), expected) < 1e-15
    assert np.abs(expected - run_exactly(turn, weight, positions)).max() > 0.1  # turned on, not back
