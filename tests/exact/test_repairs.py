"""The line where a program goes wrong is named: sums over devices, replicas that differ, values that are not finite."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardformer
from shardformer import exact

MESH = AbstractMesh((4, 2), ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(8, 6)).astype(np.float32)
UP, DOWN = (DRAW.normal(size=shape).astype(np.float32) for shape in ((6, 8), (8, 6)))


def find_line(mark: str) -> str:
    """Returns the name of this file and the number of its line that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_repairs.py:{next(i for i, line in enumerate(lines, 1) if line.endswith(mark))} "


def on_mesh(function):
    in_specs = P("dp"), P(None, "mp"), P("mp")
    return jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=P(), check_vma=False)


def dense(x, up, down):
    return jnp.mean(jnp.tanh(x @ up) @ down)


def right(x, up, down):
    return lax.pmean(jnp.mean(lax.psum(jnp.tanh(x @ up) @ down, "mp")), "dp")


def forgotten(x, up, down):
    h = jnp.tanh(x @ up)
    y = h @ down  # forgotten
    return lax.pmean(jnp.mean(jnp.square(y)), "dp")


def forgotten_in_a_loop(x, up, down):
    def body(x, _):
        h = jnp.tanh(x @ up)
        return h @ down, None  # in the loop

    x, _ = lax.scan(body, x, None, length=3)
    return lax.pmean(jnp.mean(x), "dp")


@pytest.mark.parametrize(("function", "mark"), [(forgotten, "# forgotten"), (forgotten_in_a_loop, "# in the loop")])
def test_replicas_that_differ_name_the_missing_sum(function, mark):
    (sentence,) = exact.explain(on_mesh(function), X, UP, DOWN)
    assert "a psum over mp is missing after" in sentence
    assert find_line(mark) in sentence


def test_right_program_needs_no_explanation():
    assert exact.explain(on_mesh(right), X, UP, DOWN) == []
    assert exact.run(on_mesh(right), X, UP, DOWN).outputs == pytest.approx(exact.run(dense, X, UP, DOWN).outputs)


def test_first_value_that_is_not_finite_is_named():
    def function(x):
        masked = jnp.where(x > 1e9, jnp.log(-jnp.abs(x)), jnp.zeros_like(x))  # reaches no result
        bad = jnp.log(x - 100)  # not finite
        return jnp.sum(jnp.exp(bad) + masked)

    (sentence,) = exact.explain(function, X)
    assert "not finite" in sentence
    assert find_line("# not finite") in sentence


def test_value_that_a_mask_removes_is_not_named():
    assert exact.explain(lambda x: jnp.where(x > 1e9, jnp.log(-jnp.abs(x)), jnp.zeros_like(x)).sum(), X) == []


def test_no_repair_of_another_mistake_is_invented():
    def other_mistake(x, up, down):
        return right(2 * x, up, down)

    closed, expected = jax.make_jaxpr(on_mesh(other_mistake))(X, UP, DOWN), exact.run(dense, X, UP, DOWN).outputs

    def is_right(run):
        return abs(run.outputs[0] - expected) < 1e-10

    assert exact.find_repair(closed, [X, UP, DOWN], is_right) is None


def test_xmap_program_runs_exactly():
    a, b = (DRAW.normal(size=(4, 3, 3)).astype(np.float32) for _ in range(2))
    program = shardformer.xmap(lambda a, b: lax.psum(a @ b, "i"), in_axes=(["i", ...], ["i", ...]), out_axes=[...])
    expected = np.einsum("ixy,iyz->xz", a.astype(float), b.astype(float))
    np.testing.assert_allclose(exact.run(program, a, b).outputs, expected, rtol=1e-14)


def test_wire_counts_each_tensor_with_its_axes():
    (sent,) = [each for each in exact.run(on_mesh(right), X, UP, DOWN).wire if each.axes == ("mp",)]
    assert (sent.operation, sent.shape, sent.dtype, sent.bytes, sent.times) == ("all-reduce", (2, 6), "float32", 48, 1)
    assert "test_repairs.py" in sent.line
