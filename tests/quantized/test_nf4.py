"""NF4 codes, their scales and the scales of these scales are those of bitsandbytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.quantized import packed_matrix
from tests.quantized.record_nf4 import GOLDEN, SHAPES, draw

quantize = jax.jit(packed_matrix.quantize_nf4)
later = [pytest.param(number, marks=pytest.mark.slow) for number in range(1, len(SHAPES))]


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


def test_dynamic_levels_are_bitwise_those_of_bitsandbytes(golden):
    np.testing.assert_array_equal(packed_matrix.dynamic_levels(), golden["dynamic_levels"])


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_codes_and_scales_are_bitwise_those_of_bitsandbytes(golden, number):
    (inputs, outputs), groups = SHAPES[number], SHAPES[number][0] // 64
    codes, scales, blocks = map(np.asarray, quantize(draw(number)))
    np.testing.assert_array_equal(codes, golden[f"codes{number}"].reshape(outputs, inputs // 2).T)
    np.testing.assert_array_equal(scales, golden[f"scales{number}"].reshape(outputs, groups).T)
    expected = np.append(golden[f"blocks{number}"], golden[f"mean{number}"])
    # torch's means of the last two matrices are a unit of the last digit from the nearest float32, which ours is.
    np.testing.assert_allclose(blocks, expected, rtol=0, atol=5e-7)
    exact = golden[f"plain_scales{number}"].astype(np.float64).mean()
    assert abs(blocks[-1] - exact) <= np.spacing(blocks[-1]) / 2
    other = np.asarray(quantize(draw(number) + np.float32(0.1))[0])
    assert (other != codes).any()


@pytest.mark.parametrize("number", [0, *later])
def test_dequantised_matrix_is_that_of_bitsandbytes(golden, number):
    codes, scales, blocks = quantize(draw(number))
    floats = packed_matrix.dequantize_scales(scales, blocks, (0, 0), scales.shape[0])
    dense = np.asarray(packed_matrix.dequantize(codes, floats, packed_matrix.NF4_LEVELS))[:, :4]
    expected = golden[f"dense{number}"].T
    np.testing.assert_allclose(dense, expected, atol=1e-6 * np.abs(expected).max())
    moved = np.asarray(packed_matrix.dequantize_scales(scales, blocks, (0, 256), scales.shape[0]))
    assert number == 0 or (moved != np.asarray(floats)).any()


def test_scales_of_a_part_of_the_outputs_and_inputs():
    _, codes, blocks = quantize(draw(1))
    expected = np.asarray(packed_matrix.dequantize_scales(codes, blocks, (0, 0), 3))
    part = packed_matrix.dequantize_scales(codes[1:, 90:], blocks, (1, 90), 3)
    np.testing.assert_array_equal(part, expected[1:, 90:])
    assert (np.asarray(packed_matrix.dequantize_scales(codes[1:, 90:], blocks, (0, 0), 3)) != expected[1:, 90:]).any()


@pytest.mark.parametrize("scale", [0, 1e-30, 1, 3e20])
def test_mean_is_rounded_correctly(scale):
    x = (scale * np.random.RandomState(0).uniform(size=(2, 1000))).astype(np.float32)
    exact = x.astype(np.float64).mean(-1, keepdims=True)
    np.testing.assert_allclose(packed_matrix.mean_of_positives(jnp.asarray(x)), exact, rtol=1.2e-7)
