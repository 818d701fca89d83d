"""Products of one row of activations with stored codes, which a CPU converts in registers."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.quantized import code_products, int8_matrix, packed_matrix
from shardformer.quantized.int8_matrix import Int8Matrix
from shardformer.quantized.packed_matrix import PackedMatrix
from tests import asserts, sharded

INPUTS, OUTPUTS = 600, 1600  # 75 terms of 8 rows of int8: 25 steps of 3 terms
ENTRIES, WIDTH = 2500, 96  # of a table: the rows of its last step overlap those before


def draw(*shape) -> jax.Array:
    return jnp.asarray(np.random.RandomState(sum(shape)).normal(size=shape), jnp.float32)


def make_int8():
    return Int8Matrix(*int8_matrix.quantize(draw(INPUTS, OUTPUTS), -2))


def make_table():
    return Int8Matrix(*int8_matrix.quantize(draw(ENTRIES, WIDTH), -1))


def make_packed(levels):
    codes, scales = packed_matrix.quantize_int4(draw(INPUTS, OUTPUTS))
    return PackedMatrix(codes, scales.astype(jnp.float32), levels)


def multiply_table(x, table):
    """Returns the product of a CPU without int8 products."""
    with mock.patch.object(code_products, "has_int8_products", return_value=False):
        logits_1v = int8_matrix._multiply_on_cpu(x[0], table.codes, True, jnp.float32, code_products.TILE_ROWS)
    return logits_1v[None] * table.scales.reshape(1, 1, -1)


def multiply(x, w):
    return w.multiply(x)


def multiply_on_cpu(x, w):
    """Returns the product of a CPU, where the exact interpreter computes that of other devices."""
    if isinstance(w, PackedMatrix):
        return packed_matrix._multiply_on_cpu(x[0], w, size=0)[None]
    return (int8_matrix._multiply_on_cpu(x[0], w.codes, False, jnp.float32, most_rows=0) * w.scales)[None]


CASES = {
    "int8": (make_int8, multiply),
    "table": (make_table, multiply_table),
    "int4": (functools.partial(make_packed, packed_matrix.INT4_LEVELS), multiply),
    "nf4": (functools.partial(make_packed, packed_matrix.NF4_LEVELS), multiply),
}


def to_float64(w) -> np.ndarray:
    """Returns the dequantised matrix."""
    if isinstance(w, Int8Matrix):
        return np.float64(w.codes) * np.float64(w.scales)
    levels = np.float64(w.levels)
    pairs = np.stack([levels[np.asarray(w.codes) // 16], levels[np.asarray(w.codes) % 16]], axis=1)
    dense = pairs.reshape(-1, w.codes.shape[1])
    return dense * np.repeat(np.float64(w.scales), len(dense) // len(w.scales), axis=0)


def row(case, w):
    return draw(1, 1, w.shape[-1] if case == "table" else w.shape[0])


@pytest.mark.parametrize("case", CASES)
def test_product_equals_the_dequantised_matrix(case):
    make, function = CASES[case]
    function = multiply_on_cpu if function is multiply else function
    w = make()
    x = row(case, w)
    dense = to_float64(w)
    expected = np.float64(x) @ (dense.T if case == "table" else dense)
    assert asserts.relative(exact.run(function, x, w).outputs, expected) < 1e-14
    w.scales = jnp.flip(w.scales)
    assert asserts.relative(exact.run(function, x, w).outputs, expected) > 1e-2


@pytest.mark.parametrize(
    "case", ["int8", "nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("table", "int4"))]
)
def test_compiled_product_is_the_exact_one(case):
    make, function = CASES[case]
    w = make()
    asserts.assert_compiled_is_exact(function, row(case, w), w)


def largest_float(function, x, w) -> int:
    """Returns the elements of the largest float32 array that a compiled program stores: not those inside of a loop."""
    text = jax.jit(function).lower(x, w).compile().as_text()
    stored = re.sub(r"^%(fused|wrapped)\S*computation.*?\n}", "", text, flags=re.DOTALL | re.MULTILINE)
    sizes = re.findall(r"f32\[([\d,]+)\]", stored)
    return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in sizes)


@pytest.mark.parametrize("case", ["table", "int8"])
def test_no_part_of_the_float_matrix_is_stored(case):
    make, function = CASES[case]
    w = make()
    x = row(case, w)
    accumulators = ENTRIES * code_products.LANES if case == "table" else 8 * OUTPUTS  # of 8 adjacent rows
    assert largest_float(function, x, w) <= accumulators

    def convert_first(x, w):
        dense = (w.codes.T if case == "table" else w.codes).astype(x.dtype)
        return x @ dense, dense

    assert largest_float(convert_first, x, w) == w.codes.size


@pytest.mark.parametrize("case", ["int8", "int4"])
def test_no_library_adds_the_adjacent_rows(case, monkeypatch):
    w = CASES[case][0]()

    def describe():
        if case == "int8":
            return str(jax.make_jaxpr(lambda x: code_products.multiply_row(x, w.codes))(row(case, w)[0]))
        return str(jax.make_jaxpr(lambda x: packed_matrix._multiply_row(x, w))(row(case, w)[0]))

    assert "reduce_sum" not in describe()
    monkeypatch.setattr(code_products, "fold_rows", lambda x_rO: x_rO.sum(0, keepdims=True))
    assert "reduce_sum" in describe()


@pytest.mark.parametrize(("levels", "factor"), [(packed_matrix.INT4_LEVELS, 16), (packed_matrix.NF4_LEVELS, 1)])
def test_levels_of_a_byte_are_those_of_its_codes(levels, factor):
    both = np.stack(packed_matrix._look_up_both(jnp.arange(256, dtype=jnp.uint8), levels))
    expected = np.float32(levels)[[np.arange(256) // 16, np.arange(256) % 16]] * factor
    np.testing.assert_array_equal(both, expected)
    assert (both[::-1] != expected).any()


def test_one_row_on_a_mesh():
    table, x = make_table(), draw(2, 1, WIDTH)
    specs = P("dp"), P("mp"), P("mp")

    def shard(x, codes, scales):
        return multiply_table(x, Int8Matrix(codes, scales))

    multiply, compiled = (
        run(shard, (2, 4), specs, P("dp", None, "mp")) for run in (sharded.on_mesh, sharded.compile_on_mesh)
    )
    expected = np.float64(x) @ to_float64(table).T
    assert asserts.relative(multiply(x, table.codes, table.scales), expected) < 1e-14
    assert asserts.relative(compiled(x, table.codes, table.scales), expected) < 1e-6
    assert asserts.relative(multiply(x, table.codes, jnp.roll(table.scales, ENTRIES // 4)), expected) > 1e-2


def test_terms_have_two_rows_or_more():
    """The tests' XLA flags hide the copy of codes that single rows would cost."""
    assert [code_products.choose_run(96, columns) for columns in (768, 4096, 50_000)] == [32, 4, 2]
    assert code_products.choose_run(97, 768) == 1
