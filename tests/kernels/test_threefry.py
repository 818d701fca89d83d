"""One loop over the elements gives JAX's numbers, bit for bit, in less memory; likewise masks of dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.kernels import threefry
from shardformer.kernels.threefry import THREEFRY, keep_mask


def draw(key):
    """Something of all that a key can do, as arrays."""
    layers = jax.random.split(jax.random.fold_in(key, 1 << 20), 3)
    return {
        "keys": jax.random.key_data(layers),
        "normal": jax.random.normal(key, (7, 5), jnp.float32),
        "of each layer": jax.vmap(lambda key: jax.random.normal(key, (2, 3, 4), jnp.float32))(layers),
        "one": jax.random.bits(key),
        "16 bits": jax.random.bits(key, (9,), jnp.uint16),
    }


@functools.cache
def compile_draw(impl):
    return jax.jit(lambda seed: draw(jax.random.key(seed, impl=impl)))


def draws(seed, impl):
    return jax.tree.map(np.asarray, compile_draw(impl)(np.int32(seed)))


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, -1])
def test_numbers_equal_those_of_jax(seed):
    jax.tree.map(np.testing.assert_array_equal, draws(seed, THREEFRY), draws(seed, "threefry2x32"))


def test_keys_are_computed_once_and_not_within_each_draw():
    def program(key):
        return jax.random.normal(jax.random.split(key)[1], (64, 64))

    text = jax.jit(program).lower(jax.random.key(0, impl=THREEFRY)).compile().as_text()
    largest = max(body.count(" xor(") for body in text.split("\n}\n"))
    assert largest < 30  # 20 rounds and the schedule; 44 with the key's rounds


def test_another_rotation_gives_other_numbers(monkeypatch):
    counters = np.array([[0] * 9, range(9)], np.uint32)

    def words():
        return np.bitwise_xor(*threefry.threefry((np.uint32(0), np.uint32(7)), counters))

    right = jax.random.bits(jax.random.key(7), (9,))
    assert (words() == right).all()
    monkeypatch.setattr(threefry, "ROTATIONS", ((13, 15, 26, 6), (17, 29, 16, 25)))
    assert (words() != right).all()


def test_more_than_2_32_numbers_are_drawn_by_jax():
    def program(*shape):
        def bits(key):
            return threefry.random_bits(key, 32, shape)

        return str(jax.make_jaxpr(bits)(np.zeros(2, np.uint32)))

    assert "random_bits[" in program(2**16, 2**16)
    assert "random_bits[" not in program(2**16, 2**15)


def test_numbers_of_64_bits_are_drawn_by_jax():
    with jax.enable_x64(True):
        first, second = (jax.random.bits(jax.random.key(7, impl=impl), (9,), "uint64") for impl in (THREEFRY, None))
    np.testing.assert_array_equal(first, second)
    assert first.dtype == "uint64"


def test_draw_needs_no_second_array():
    def temporaries(impl):
        normal = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed, impl=impl), (256, 64), jnp.float32))
        return normal.lower(np.int32(0)).compile().memory_analysis().temp_size_in_bytes

    array = 4 * 256 * 64
    assert temporaries(THREEFRY) < array / 10
    assert temporaries("threefry2x32") > array


ROWS, COLUMNS = np.arange(4), np.arange(6)
MASK_KEYS = jax.random.split(jax.random.key(3), (2, 3))


def masks(rate, rows=ROWS, columns=COLUMNS):
    key_data = jax.random.key_data(MASK_KEYS)
    return np.asarray(keep_mask(key_data, rate, jnp.asarray(rows), jnp.asarray(columns), len(COLUMNS)))


def bernoulli(rate):
    return np.array([[jax.random.bernoulli(key, 1 - rate, (4, 6)) for key in row] for row in MASK_KEYS])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_are_those_of_bernoulli(rate):
    np.testing.assert_array_equal(masks(rate), bernoulli(rate))


def test_a_number_equal_to_the_share_is_dropped():
    drawn = float(jax.random.uniform(MASK_KEYS[1, 2], (4, 6))[2, 5])
    assert not masks(1 - drawn)[1, 2, 2, 5]
    np.testing.assert_array_equal(masks(1 - drawn), bernoulli(1 - drawn))


def test_part_of_a_mask_is_cut_from_the_full_one():
    part = masks(0.5, rows=ROWS[[3, 1]], columns=COLUMNS[2:5])
    np.testing.assert_array_equal(part, masks(0.5)[..., [3, 1], 2:5])
