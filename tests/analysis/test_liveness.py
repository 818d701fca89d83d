"""The estimate of temporary memory, on functions small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardformer.analysis import liveness
from shardformer.exact import jaxprs
from shardformer.quantized import code_products

N = 64
MATRIX = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N


def peak(function, *args, **options):
    return liveness.peak_bytes(jax.make_jaxpr(function)(*args).jaxpr, **options)


def test_products_take_memory_elementwise_results_do_not():
    assert peak(lambda x: jnp.sin(x @ x) * 2 + 1, MATRIX) == BYTES


def test_products_with_codes_are_products():
    """The operation hides how a device multiplies; a CPU's tiles would be read and written many times."""
    codes = jax.ShapeDtypeStruct((N, N), jnp.int8)
    multiply = code_products.fold_batches(lambda x, w: x @ w.astype(x.dtype))
    jaxpr = jax.make_jaxpr(lambda x, w: multiply(jnp.sin(x @ x), w))(MATRIX, codes).jaxpr
    assert liveness.traffic_bytes(jaxpr) == 4 * BYTES + N * N  # the first reads and writes, then the second with codes
    assert liveness.peak_bytes(jaxpr) == 2 * BYTES


def test_traffic_of_a_slice_is_its_own_bytes():
    """Attention in blocks reads a block of the keys at a time, not all of them."""

    def blocks(x):
        return lax.map(lambda i: lax.dynamic_slice_in_dim(x, i * 8, 8) @ x.T, jnp.arange(N // 8))

    assert liveness.traffic_bytes(jax.make_jaxpr(blocks)(MATRIX).jaxpr) == (N // 8) * (BYTES // 8 + BYTES + BYTES // 8)


def test_a_slice_that_is_stored_reads_its_own_bytes():
    """A gather reads the slice from memory: it is read, written and read again, and half of it is the result."""

    def take(x):
        return lax.map(lambda i: lax.dynamic_slice_in_dim(x, i * 8, 8)[jnp.arange(4)], jnp.arange(N // 8))

    block = BYTES // (N // 8)
    assert liveness.traffic_bytes(jax.make_jaxpr(take)(MATRIX).jaxpr) == (N // 8) * (3 * block + block // 2)


def test_an_intermediate_ends_with_its_last_use():
    assert peak(lambda x: ((x @ x) @ x) @ x, MATRIX) == 2 * BYTES

    def kept(x):
        first = x @ x
        return ((first @ x) @ x) @ x + first

    assert peak(kept, MATRIX) == 3 * BYTES


def test_sources_of_elementwise_results_live_until_use():
    def late(x):
        scaled = jnp.sin(x @ x)
        return (x @ x @ x) @ scaled

    assert peak(late, MATRIX) == 3 * BYTES


def test_a_loop_stacks_what_the_backward_pass_needs():
    def layers(x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ h), None), x, None, length=10)[0].sum()

    forward, backward = peak(layers, MATRIX), peak(jax.grad(layers), MATRIX)
    assert forward <= 3 * BYTES
    assert backward > 10 * BYTES

    def layer(h, _):
        return jnp.tanh(h @ h @ h @ h), None

    def sum_of(layer):
        return lambda x: lax.scan(layer, x, None, length=10)[0].sum()

    plain, recomputed = (peak(jax.grad(sum_of(each)), MATRIX) for each in (layer, jax.checkpoint(layer)))
    assert recomputed < 0.6 * plain


def test_product_added_to_a_carried_sum_takes_no_memory():
    def sum_of_products(x, factor=1):
        def add(total, _):
            product = x @ x
            return total + (product if factor == 1 else product @ product), None

        return lax.scan(add, jnp.zeros_like(x), None, length=10)[0]

    assert peak(sum_of_products, MATRIX) == BYTES
    assert peak(sum_of_products, MATRIX, cpu=True) == 3 * BYTES  # with the zeros that a CPU stores
    assert peak(lambda x: sum_of_products(x, factor=2), MATRIX) == 2 * BYTES  # the first product is a factor


def test_product_takes_the_size_of_its_only_cast():
    half = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)

    def cast(x, more=False):
        product = x @ x
        return jnp.sin(product.T.astype(jnp.float32)).sum(0), product if more else None

    row = 4 * N
    assert peak(cast, half) == BYTES + row
    assert peak(lambda x: cast(x, more=True), half) == BYTES // 2 + row  # bfloat16, as it is a result too


def test_results_of_a_branch_count_once():
    def choose(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert peak(choose, MATRIX) == 2 * BYTES  # a product of the second branch, and the result


def test_gather_reads_its_operand_from_memory():
    def pick(x, rows):
        return jnp.tanh(x).at[rows].get(mode="clip").sum(1)

    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    picked = 2 * 4 * N + 2 * 4
    assert BYTES <= peak(pick, MATRIX, rows) <= BYTES + 2 * picked
    assert peak(lambda x, rows: pick(x.T, rows), MATRIX, rows) <= BYTES + 2 * picked
    assert peak(lambda x, rows: x.T.at[rows].get(mode="clip").sum(1), MATRIX, rows) <= 2 * picked  # x is an input


def test_elementwise_result_overwrites_operand_of_one_reader():
    def pick(x, rows, more=False):
        wide = jnp.tanh(x @ x)
        return wide.at[rows].get(mode="clip").sum(1), wide.sum(1) if more else None

    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert BYTES <= peak(pick, MATRIX, rows) <= BYTES + 6 * 4 * N
    assert 2 * BYTES <= peak(lambda *args: pick(*args, more=True), MATRIX, rows) <= 2 * BYTES + 6 * 4 * N


def test_loop_reads_computed_operands_from_memory():
    def layers(x, scale):
        return lax.scan(lambda h, _: (h @ scale(x), None), x, None, length=10)[0]

    inside = peak(lambda x: layers(x, jnp.tanh), MATRIX)

    def outside(x):
        wide = jnp.tanh(x)
        return layers(x, lambda _: wide)

    assert peak(outside, MATRIX) == inside + BYTES


def test_gradient_waits_with_its_scatter_as_in_the_trace():
    """A TPU's compiler scatters the head's gradient of gptj_6b at once, those of Llama-3-8B and NeoX-20B later."""
    mesh = AbstractMesh((4,), ("dp",), axis_types=(AxisType.Auto,))

    def body(x):
        gradient = x @ x
        loop = lax.scan(lambda h, _: (h @ h @ h @ h, None), x, None, length=2)[0]
        return lax.psum_scatter(gradient, "dp", tiled=True), loop

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=(P("dp"), P("dp")))
    whole = jax.ShapeDtypeStruct((4 * N, N), jnp.float32)
    (traced,) = jaxprs.find_shard_maps(jax.make_jaxpr(mapped)(whole).jaxpr)
    assert liveness.peak_bytes(traced) == 4 * BYTES  # the gradient, the loop's result and two of its products


def test_a_cpu_writes_a_products_operands_to_memory():
    def function(x):
        return jnp.sin(x) @ x

    assert peak(function, MATRIX) == BYTES
    assert peak(function, MATRIX, cpu=True) == 2 * BYTES


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, axis_size=1)])
def test_calls_are_looked_into(call):
    args = (MATRIX,) if call in (jax.jit, jax.checkpoint) else (jax.ShapeDtypeStruct((1, N, N), jnp.float32),)
    assert peak(call(lambda x: (x @ x) @ x), *args) == 2 * BYTES


def live(function, *args):
    """Without what is dead; that the rest computes the same is seen by running it."""
    traced = jax.make_jaxpr(function)(*args)
    smaller = jaxprs.drop_dead(traced.jaxpr)
    inputs = [jnp.full(each.shape, 0.01 * (i + 1), each.dtype) for i, each in enumerate(args)]
    got, expected = (jax.core.eval_jaxpr(each, traced.consts, *inputs) for each in (smaller, traced.jaxpr))
    assert [x.tolist() for x in got] == [x.tolist() for x in expected]
    return smaller


def test_unused_stacked_results_of_a_scan_are_dropped():
    def layers(x):
        def layer(carry, _):
            h, other = carry
            return (jnp.tanh(h @ h), other @ h), ((h @ h) @ h, h)

        (h, _), stacked = lax.scan(layer, (x, x), None, length=10)
        return h, *stacked

    assert liveness.peak_bytes(jax.make_jaxpr(lambda x: layers(x)[0])(MATRIX).jaxpr) > 20 * BYTES
    assert 10 * BYTES < liveness.peak_bytes(live(lambda x: layers(x)[:2], MATRIX)) < 15 * BYTES
    alone = live(lambda x: layers(x)[0], MATRIX)
    assert liveness.peak_bytes(alone) == 2 * BYTES  # the carry, and the product in the body
    (scan,) = (each for each in alone.eqns if each.primitive.name == "scan")
    assert [each.primitive.name for each in jaxprs.read_loop(scan).body.eqns] == ["dot_general", "tanh"]


def test_a_carry_that_a_wanted_one_is_computed_from_is_kept():
    def layers(x, w):
        def step(carry, _):
            return (carry[1] @ w, carry[2] + 1, carry[0] * 2, carry[3] @ w), None

        return lax.scan(step, (x, x, x, x), None, length=4)[0][0]

    (scan,) = (each for each in live(layers, MATRIX, MATRIX).eqns if each.primitive.name == "scan")
    loop = jaxprs.read_loop(scan)
    assert (loop.constants, loop.carried) == (1, 3)


def test_a_branch_computes_what_is_used_of_its_results():
    def choose(x, y):
        return lax.cond(x[0, 0] > 0, lambda x, y: (x @ x, x @ y), lambda x, y: (x, y @ y), x, y @ y @ y)[0]

    smaller = live(choose, MATRIX, MATRIX)
    assert "dot_general" not in {each.primitive.name for each in smaller.eqns}  # y's product is read by nobody
    (branches,) = (jaxprs.bodies(each) for each in smaller.eqns if each.primitive.name == "cond")
    assert sorted(len(branch.eqns) for branch in branches) == [0, 1]


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_dead_operations_inside_calls_are_dropped(call):
    inner = call(lambda x, y: (x @ x, y @ y @ y))
    traced = jax.make_jaxpr(lambda x, y: inner(x, y @ y)[0])(MATRIX, MATRIX).jaxpr
    smaller = jaxprs.drop_dead(traced)
    assert liveness.peak_bytes(smaller) == BYTES < liveness.peak_bytes(traced)
    used = {variable for equation in smaller.eqns for variable in equation.invars if not hasattr(variable, "val")}
    assert [variable in used for variable in smaller.invars] == [True, False]  # all inputs stay


def test_heads_take_full_lanes_of_a_tpu():
    """Ten layers keep heads of 64 numbers, and the carry has them: each in a row of 128."""
    heads = jax.ShapeDtypeStruct((2, N, 4, 64), jnp.float32)

    def layers(x):
        return lax.scan(lambda h, _: (jnp.sin(h), h), x, None, length=10)[1]

    size = 4 * 2 * N * 4 * 64
    assert peak(layers, heads) == 11 * size
    assert peak(layers, heads, head_size=64) == 22 * size
    assert peak(layers, heads, head_size=32) == 11 * size  # no array of heads of 32


def test_kernel_reads_its_operands_from_memory():
    """A product computes an elementwise operand itself; a kernel does not."""

    def copy(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    kernel = pl.pallas_call(copy, out_shape=MATRIX)
    assert peak(lambda x: kernel(jnp.sin(x)), MATRIX) == 2 * BYTES
    assert peak(lambda x: jnp.sin(x) @ x, MATRIX) == BYTES
