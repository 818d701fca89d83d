"""int8 codes, their scales, and products that never store the float matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.quantized import code_products, int8_matrix
from shardformer.quantized.int8_matrix import Int8Matrix
from tests import asserts

INPUTS, OUTPUTS = 600, 1600  # two tiles or more of either orientation, and a remainder
ROWS = code_products.MOST_ROWS_OF_DIGITS + 1  # fewer are multiplied by digits


def quantize_by_hand(w, axis):
    """Returns codes and scales of NumPy."""
    scales = np.abs(w).max(axis, keepdims=True).astype(np.float32) * np.float32(1 / 127)
    return np.rint(w * (1 / np.where(scales > 0, scales, np.float32(1)))).astype(np.int8), scales


def matrix(transposed=False):
    w = np.random.RandomState(0).normal(size=(OUTPUTS, INPUTS) if transposed else (INPUTS, OUTPUTS))
    return w.astype(np.float32)


def activations():
    return np.random.RandomState(1).normal(size=(1, ROWS, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("axis", [-2, -1])
def test_codes_and_scales_equal_numpy(axis):
    w = matrix()
    w[:, 5] = 0
    w[7] = 0
    codes, scales = map(np.asarray, int8_matrix.quantize(jnp.asarray(w), axis))
    expected_codes, expected_scales = quantize_by_hand(w, axis)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)
    assert codes.dtype == np.int8
    assert np.abs(w - codes * scales).max() <= scales.max() / 2 * 1.001
    assert (quantize_by_hand(w, -3 - axis)[0] != codes).any()


class QuantizedWeight8bit:
    """The formula of Grok-1's class of this name, whose Linear multiplies by `weight.astype(scales.dtype) * scales`."""

    def __init__(self, weight, scales):
        self.weight, self.scales = weight, scales

    def dequantize(self):
        return self.weight.astype(self.scales.dtype) * self.scales


def test_dequantised_rows_are_bitwise_those_of_grok():
    codes, scales = int8_matrix.quantize(jnp.asarray(matrix()), -1)
    expected = np.asarray(QuantizedWeight8bit(codes, scales).dequantize())
    np.testing.assert_array_equal(np.asarray(Int8Matrix(codes, scales)[jnp.arange(INPUTS)]), expected)
    assert (np.asarray(QuantizedWeight8bit(codes, scales[::-1]).dequantize()) != expected).any()


@pytest.mark.parametrize("transposed", [False, True])
def test_product_equals_the_dequantised_matrix(transposed):
    axis = -1 if transposed else -2
    codes, scales = int8_matrix.quantize(jnp.asarray(matrix(transposed)), axis)
    dense = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)
    expected = activations().astype(np.float64) @ (dense.T if transposed else dense)
    w = Int8Matrix(codes, scales)

    def multiply(x, w):
        return int8_matrix.multiply_table(x, w, tied=transposed)

    assert asserts.relative(exact.run(multiply, activations(), w).outputs, expected) < 1e-14
    if not transposed:
        assert asserts.relative(exact.run(int8_matrix.multiply, activations(), w).outputs, expected) < 1e-14
    wrong = exact.run(multiply, activations(), Int8Matrix(codes, jnp.flip(scales))).outputs
    assert np.abs(wrong - expected).max() > 0.1
    asserts.assert_compiled_is_exact(multiply, activations(), w)


def float_shapes(program: str) -> set[str]:
    """Returns the shapes of all float32 arrays in a compiled program."""
    return {word.partition("[")[2].partition("]")[0] for word in program.split() if word.startswith("f32[")}


@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_product_has_no_float_matrix(transposed):
    shape = (OUTPUTS, INPUTS) if transposed else (INPUTS, OUTPUTS)
    w = Int8Matrix(
        jax.ShapeDtypeStruct(shape, jnp.int8),
        jax.ShapeDtypeStruct((OUTPUTS, 1) if transposed else (1, OUTPUTS), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((1, ROWS, INPUTS), jnp.float32)

    def multiply(x, w):
        return int8_matrix.multiply_table(x, w, transposed)

    def multiply_at_once(x, w):
        return x @ (w.codes.T if transposed else w.codes).astype(x.dtype)

    full = {f"{OUTPUTS},{INPUTS}", f"{INPUTS},{OUTPUTS}"}
    tiled = jax.jit(multiply).lower(x, w).compile()
    assert not float_shapes(tiled.as_text()) & full
    assert tiled.memory_analysis().temp_size_in_bytes < 4 * INPUTS * OUTPUTS / 2
    assert float_shapes(jax.jit(multiply_at_once).lower(x, w).compile().as_text()) & full


def test_matrices_are_converted_one_tile_at_a_time():
    """The conversion of a tile needs no activations: outside of the loop, XLA would convert those of all matrices."""
    shapes = [(INPUTS, OUTPUTS), (OUTPUTS, INPUTS)] * 2
    matrices = [
        Int8Matrix(jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct((1, shape[1]), jnp.float32))
        for shape in shapes
    ]

    def temporary_bytes(multiply):
        def chain(x, matrices):
            for w in matrices:
                x = multiply(x, w)
            return x

        x = jax.ShapeDtypeStruct((1, ROWS, INPUTS), jnp.float32)
        return jax.jit(chain).lower(x, matrices).compile().memory_analysis().temp_size_in_bytes

    def convert_first_rows_apart(x, w):
        first = w.codes[:256].astype(x.dtype)
        return x[..., :256] @ first + x[..., 256:] @ w.codes[256:].astype(x.dtype)

    assert temporary_bytes(int8_matrix.multiply) < 4 * (2 * code_products.TILE_ELEMENTS + ROWS * OUTPUTS)
    assert temporary_bytes(convert_first_rows_apart) > 4 * 4 * code_products.TILE_ELEMENTS
