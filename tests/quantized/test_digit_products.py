"""Products of a few rows with int8 codes, by int8 digits of the rows.

The exact interpreter runs them with the rounding that they store; one product of each orientation is compiled.
"""

import functools
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.quantized import code_products, int8_matrix
from shardformer.quantized.int8_matrix import Int8Matrix

ROWS, INPUTS, OUTPUTS = 5, 96, 160


@pytest.fixture
def new_programs():
    """Forgets traces of products with the functions that a test replaced."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def draw_rows(dtype=np.float32):
    """Returns rows of several magnitudes; one has an outlier and one is zero."""
    x = np.random.RandomState(0).normal(size=(ROWS, INPUTS)) * np.array([[1, 1e-20, 1e20, 1, 0]]).T
    x[3, 7] = 1000
    return jnp.asarray(x, dtype)


def draw_codes(transposed):
    shape = (OUTPUTS, INPUTS) if transposed else (INPUTS, OUTPUTS)
    return np.random.RandomState(1).randint(-127, 128, shape).astype(np.int8)


def multiply(x, codes, transposed=False):
    product = functools.partial(code_products.multiply_digits, transposed=transposed)
    return exact.run(product, x, codes, floats="stored").outputs


def compile_product(x, codes, transposed=False):
    return jax.jit(lambda x, codes: code_products.multiply_digits(x, codes, transposed))(x, codes)


def largest_difference(x, codes, transposed, multiply=multiply):
    """Returns the largest difference from the product in float64, relative to each row's largest value."""
    expected = np.asarray(x, np.float64) @ (codes.T if transposed else codes).astype(np.float64)
    got = np.asarray(multiply(x, codes, transposed), np.float64)
    size = np.abs(expected).max(-1)
    return (np.abs(got - expected).max(-1) / np.where(size > 0, size, 1)).max()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 4e-4)])
def test_digits_have_the_precision_of_the_dtype(dtype, bound, transposed, monkeypatch):
    x, codes = draw_rows(dtype), draw_codes(transposed)
    assert largest_difference(x, codes, transposed) < bound
    monkeypatch.setitem(code_products.DIGITS, dtype, code_products.DIGITS[dtype] - 1)
    assert largest_difference(x, codes, transposed) > 10 * bound


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 4e-4)])
def test_compiled_digits_have_the_precision_of_the_dtype(dtype, bound, transposed):
    assert largest_difference(draw_rows(dtype), draw_codes(transposed), transposed, compile_product) < bound


def test_logits_of_bfloat16_have_the_precision_of_float32(monkeypatch, new_programs):
    def compute_logits(x, codes, transposed):
        table = Int8Matrix(jnp.asarray(codes), jnp.ones((len(codes), 1), jnp.float32))
        return int8_matrix.multiply_table(x[None], table, transposed)[0]

    monkeypatch.setattr(code_products, "has_int8_products", lambda: True)
    x, codes = draw_rows("bfloat16"), draw_codes(True)
    assert largest_difference(x, codes, True, compute_logits) < 1e-6
    assert largest_difference(x, codes, True, compile_product) > 1e-5


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("multiply", [multiply, compile_product])
def test_rows_that_are_not_finite_stay_so(value, multiply):
    x = draw_rows().at[0, 3].set(value)
    y = np.asarray(multiply(x, draw_codes(False)))
    assert not np.isfinite(y[0]).any()
    assert np.isfinite(y[1:]).all()


def test_zero_rows_have_zero_products():
    assert (multiply(draw_rows(), draw_codes(False))[4] == 0).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not known of other processors")
def test_int8_products_are_available():
    assert code_products.has_int8_products()


def test_no_converted_matrix_is_stored():
    x = jax.ShapeDtypeStruct((2, 512), jnp.float32)
    w = Int8Matrix(jax.ShapeDtypeStruct((512, 2048), jnp.int8), jax.ShapeDtypeStruct((1, 2048), jnp.float32))

    def temporary_bytes(function):
        return jax.jit(function).lower(x, w).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(int8_matrix.multiply) < 2 * w.codes.size
    assert temporary_bytes(lambda x, w: x @ w.codes.astype(x.dtype)) >= 4 * w.codes.size


def test_few_rows_are_multiplied_by_digits(monkeypatch, new_programs):
    counted = []
    multiply = code_products.multiply_digits
    monkeypatch.setattr(code_products, "multiply_digits", lambda x, *args: counted.append(len(x)) or multiply(x, *args))
    w = Int8Matrix(*int8_matrix.quantize(jnp.asarray(draw_codes(False), jnp.float32), -2))

    def multiply_table(x, w):
        return int8_matrix.multiply_table(x, Int8Matrix(w.codes.T, w.scales.T), True)

    def count_rows(shape, function=int8_matrix.multiply):
        counted.clear()
        jax.eval_shape(function, jax.ShapeDtypeStruct((*shape, INPUTS), jnp.float32), w)
        return list(counted)

    monkeypatch.setattr(code_products, "has_int8_products", lambda: True)
    assert count_rows((2, 3)) == [6]
    assert count_rows((1, 1)) == []
    assert count_rows((1, code_products.MOST_ROWS_OF_DIGITS + 1)) == []
    assert 4 in count_rows((4, 1, 1), jax.vmap(int8_matrix.multiply, (0, None)))
    assert count_rows((1, 1), multiply_table) == [1]
    monkeypatch.setattr(code_products, "has_int8_products", lambda: False)
    in_registers = code_products.multiply_row_by_table
    monkeypatch.setattr(
        code_products, "multiply_row_by_table", lambda x, *args: counted.append("registers") or in_registers(x, *args)
    )
    jax.clear_caches()
    assert count_rows((2, 3)) == []
    assert count_rows((1, 1), multiply_table) == ["registers"]
