"""The estimate of temporary memory, on functions small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardformer.report import liveness

N = 64
MATRIX = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N


def peak(function, *args, **options):
    return liveness.peak_bytes(jax.make_jaxpr(function)(*args).jaxpr, **options)


def test_a_product_is_in_memory_and_what_follows_it_elementwise_is_not():
    assert peak(lambda x: jnp.sin(x @ x) * 2 + 1, MATRIX) == BYTES


def test_an_intermediate_ends_with_its_last_use():
    assert peak(lambda x: ((x @ x) @ x) @ x, MATRIX) == 2 * BYTES

    def kept(x):
        first = x @ x
        return ((first @ x) @ x) @ x + first

    assert peak(kept, MATRIX) == 3 * BYTES


def test_what_an_elementwise_result_is_made_of_lives_until_it_is_used():
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
    recomputed = lambda x: lax.scan(jax.checkpoint(lambda h, _: (jnp.tanh(h @ h @ h @ h), None)), x, None, length=10)[
        0
    ].sum()
    plain = lambda x: lax.scan(lambda h, _: (jnp.tanh(h @ h @ h @ h), None), x, None, length=10)[0].sum()
    assert peak(jax.grad(recomputed), MATRIX) < 0.6 * peak(jax.grad(plain), MATRIX)


def test_a_cpu_writes_a_products_operands_to_memory():
    function = lambda x: jnp.sin(x) @ x
    assert peak(function, MATRIX) == BYTES
    assert peak(function, MATRIX, cpu=True) == 2 * BYTES


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, axis_size=1)])
def test_calls_are_looked_into(call):
    args = (MATRIX,) if call in (jax.jit, jax.checkpoint) else (jax.ShapeDtypeStruct((1, N, N), jnp.float32),)
    assert peak(call(lambda x: (x @ x) @ x), *args) == 2 * BYTES
