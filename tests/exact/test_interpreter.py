"""Loops, conditionals and calls give each of eight devices the results of its own; errors name the user's line."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.errors import RunError, UsageError
from shardformer.exact import interpreter
from shardformer.exact.operations import RULES
from tests.exact.comparison import describe_difference, vary
from tests.sharded import compile_on_mesh

AXES = "dp", "mp"


def count_down(x, n):
    """Takes another number of iterations on each device."""
    return lax.while_loop(lambda c: c[1] > 0, lambda c: (jnp.sin(c[0]) + 1, c[1] - 1), (x, n))[0]


def count_together(x, n):
    """Takes as many iterations on all devices along mp, as its body communicates."""
    return lax.while_loop(
        lambda c: c[1] > 0, lambda c: (lax.pmean(jnp.sin(c[0]), "mp") + c[0], c[1] - 1), (x, lax.pmax(n, "mp"))
    )[0]


def halve(row):
    return lax.while_loop(lambda row: jnp.abs(row).max() > 0.3, lambda row: row / 2, row)


def choose(x, n):
    return lax.switch(n, [lambda x: x + 1, lambda x: x * x, lambda x: jnp.zeros_like(x)], x)


def scan(x, n, **options):
    return lax.scan(lambda c, s: (jnp.cos(c + s), c * s), x[0], x, **options)


@jax.custom_jvp
def double(x):
    return 2 * x


double.defjvp(lambda primals, tangents: (double(*primals), 3 * tangents[0]))


@jax.custom_vjp
def triple(x):
    return 3 * x


triple.defvjp(lambda x: (triple(x), x), lambda x, g: (g * jnp.sin(x),))

BODIES = {
    "while": count_down,
    "while with collectives": count_together,
    "while of each row": lambda x, n: jax.vmap(halve)(x),
    "switch": choose,
    "cond": lambda x, n: lax.cond(n > 1, jnp.sin, lambda x: x - 1, x),
    "cond of a replicated value": lambda x, n: lax.cond(lax.pmax(n, AXES) > 1, jnp.sin, lambda x: x - 1, x),
    "scan": scan,
    "scan backwards": functools.partial(scan, reverse=True),
    "scan unrolled": functools.partial(scan, unroll=2),
    "scan without outputs": lambda x, n: lax.scan(lambda c, s: (c + s, None), x[0], x)[0],
    "scan without inputs": lambda x, n: lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3),
    "scan without iterations": lambda x, n: lax.scan(lambda c, s: (c + s, s), x[0], x[:0]),
    "scan without carry": lambda x, n: lax.scan(lambda c, s: (c, s * 2), (), x)[1],
    "scan of a psum": lambda x, n: lax.scan(lambda c, s: (lax.psum(c, "dp") * 0.1 + s, c), x[0], x),
    "fori_loop": lambda x, n: lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x),
    "map": lambda x, n: lax.map(lambda row: row + x[n], x),
    "associative_scan": lambda x, n: lax.associative_scan(jnp.add, x),
    "jit": lambda x, n: jax.jit(lambda x: jnp.sin(x) * x[n, 0])(x),
    "custom_jvp": lambda x, n: [double(x), jax.grad(lambda x: double(x).sum())(x)],
    "custom_vjp": lambda x, n: [triple(x), jax.grad(lambda x: triple(x).sum())(x)],
    "remat": lambda x, n: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x) ** 3)(x).sum())(x),
    "gradient of a scan": lambda x, n: jax.grad(lambda x: scan(x, n)[1].sum())(x),
    "gradient of a psum": lambda x, n: jax.grad(lambda x: jnp.sin(lax.psum(x, "mp")).sum())(x),
    "gradient of all_gather": lambda x, n: jax.grad(lambda x: jnp.sin(lax.all_gather(x, "dp")).sum())(x),
    "gradient of cond": lambda x, n: jax.grad(lambda x: choose(x, n).sum())(x),
    "vmap of a psum": lambda x, n: jax.vmap(lambda row: lax.psum(row, AXES))(x),
    "jvp": lambda x, n: jax.jvp(jnp.tanh, (x,), (x,)),
    "platform": lambda x, n: lax.platform_dependent(x, tpu=lambda x: x + 1, default=lambda x: x - 1),
}  # fmt: skip


def body(x, n):
    x, n = (vary(each, AXES) for each in (x, n[0, 0]))
    results = {name: function(x, n) for name, function in BODIES.items()}
    return jax.tree.map(lambda y: y[(None, None)], results)


# Of each program's two ways to split its arguments, one has x or n on all devices.
SPLITS = {
    True: ((P("dp"), P("dp", "mp")), (P(None, "mp"), P("dp"))),
    False: ((P(None, None), P("dp", "mp")), (P("dp", "mp"), P())),
}


@pytest.fixture(scope="module", params=[True, False], ids=["check_vma", "no check"])
def compared(request):
    """Returns the programs of two ways to split the arguments, these arguments and the devices' results."""
    programs = []
    for i, specs in enumerate(SPLITS[request.param]):
        sizes = [dict(zip(AXES, (4, 2), strict=True)).get(axis, 1) for axis in (*specs[0], None, None)[:2]]
        x = np.random.RandomState(i).uniform(-1, 1, (4 * sizes[0], 3 * sizes[1])).astype(np.float32)
        n = np.random.RandomState(i).randint(0, 4, (4, 2), np.int32)
        n = n if specs[1] != P() else n[:1, :1]
        n = n[:, :1] if specs[1] == P("dp") else n
        programs.append((compile_on_mesh(body, (4, 2), specs, P(*AXES), check_vma=request.param), (x, n)))
    return [(program, arguments, program(*arguments)) for program, arguments in programs]


def list_differences(compared):
    for number, (program, arguments, expected) in enumerate(compared):
        got = exact.run(program, *arguments).outputs
        for name in expected:
            for x, y in zip(jax.tree.leaves(got[name]), jax.tree.leaves(expected[name]), strict=True):
                if difference := describe_difference(x, np.asarray(y), 2e-6):
                    yield f"{name} of split {number}: {difference}"


def test_control_flow_is_that_of_devices(compared):
    assert not list(list_differences(compared))


@pytest.mark.parametrize("name", ["_where", "_stack", "split", "join"])
@pytest.mark.parametrize("compared", [False], indirect=True)
def test_wrong_control_flow_is_noticed(compared, broken, name):
    right = getattr(interpreter, name)

    def wrong(*arguments):
        result = right(*arguments)
        return result + np.ones((), result.dtype)

    broken(interpreter, name, wrong)
    assert any(list_differences(compared))


def test_nested_shard_maps_are_those_of_devices():
    x = np.random.RandomState(0).uniform(-1, 1, (8, 6)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), AXES)

    def outer(x):
        def inner(y):
            return lax.psum(y, "mp") + lax.axis_index("dp").astype(np.float32)

        return jax.shard_map(inner, in_specs=P(None, "mp"), out_specs=P(), axis_names={"mp"})(x) * 2

    program = jax.jit(jax.shard_map(outer, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}))
    assert not describe_difference(exact.run(program, x).outputs, np.asarray(program(x)), 1e-6)


def test_placements_change_nothing():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), AXES)
    placed = NamedSharding(mesh, P("dp"))
    result = exact.run(lambda x: lax.with_sharding_constraint(jax.device_put(x, placed) * 2, placed), np.arange(8.0))
    assert result.outputs.tolist() == list(range(0, 16, 2))


def test_operation_without_a_rule_is_named(monkeypatch):
    monkeypatch.delitem(RULES, "sin")
    with pytest.raises(
        UsageError, match=r"no rule for the operation sin, which tests/exact/test_interpreter\.py:\d+ \("
    ):
        exact.run(lambda x: jnp.sin(x), np.ones(3))


def test_unknown_axis_is_named():
    mesh = AbstractMesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    inner = jax.make_jaxpr(lambda x: lax.psum(x, "dp"), axis_env=[("dp", 2)])(np.ones(3, np.float32))
    with pytest.raises(UsageError, match=r"test_interpreter\.py:\d+ .*names the axis dp, which no shard_map around it"):
        interpreter.run_jaxpr(inner, [np.ones(3)])
    assert mesh.shape == {"dp": 2}


def test_memory_limit_names_the_line():
    with pytest.raises(RunError, match=r"arrays take .* at tests/exact/test_interpreter\.py:\d+ .* are allowed"):
        exact.run(lambda x: jnp.sin(x) + 1, np.ones(1000), memory=4000)
    exact.run(lambda x: jnp.sin(x) + 1, np.ones(1000), memory=20_000)


def test_memory_of_freed_arrays_is_not_counted():
    def many(x):
        for _ in range(50):
            x = jnp.sin(x)
        return lax.scan(lambda c, _: (jnp.cos(c), None), x, None, length=50)[0]

    exact.run(many, np.ones(1000), memory=40_000)


DTYPES = np.float32, jnp.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_stored_floats_are_bitwise_those_of_xla(dtype):
    random = np.random.RandomState(0)
    x, y = (random.normal(size=2000).astype(dtype) for _ in range(2))
    functions = [lax.add, lax.sub, lax.mul, lax.div, lax.max, lambda x, y: x.astype(np.float32) * 3, lambda x, _: -x]
    for function in functions:
        got = exact.run(function, x, y, floats="stored").outputs
        expected = np.asarray(jax.jit(function)(x, y))
        assert np.array_equal(got.astype(expected.dtype).view(np.uint8), expected.view(np.uint8))
        assert np.array_equal(got, got.astype(expected.dtype))


def test_floats_are_not_rounded_by_default():
    x = np.float32(1) / np.float32(3)
    assert exact.run(lambda x: x * x, x).outputs == np.float64(x) ** 2
    assert exact.run(lambda x: x * x, x, floats="stored").outputs == x * x


def test_differing_replicas_are_reported():
    def program(x):
        mesh = AbstractMesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
        return jax.shard_map(lambda x: x * 1.0, mesh=mesh, in_specs=P("dp", "mp"), out_specs=P("dp"), check_vma=False)(
            x
        )

    (found,) = exact.run(program, np.arange(8.0, dtype=np.float32).reshape(4, 2)).disagreements
    assert (found.output, found.axis, found.difference) == (0, "mp", 1.0)


def test_sent_tensors_are_counted():
    def program(x):
        mesh = AbstractMesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
        step = lambda c, _: (lax.psum(c, "dp"), None)  # noqa: E731
        body = lambda x: lax.all_gather(lax.scan(step, x, None, length=3)[0], "mp", tiled=True)  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=P("dp", "mp"), out_specs=P("dp"), check_vma=False)(x)

    sent = exact.run(program, np.ones((8, 6), np.float32)).wire
    assert [(each.operation, each.axes, each.shape, each.times, each.bytes) for each in sent] == [
        ("all-reduce", ("dp",), (2, 3), 3, 24),
        ("all-gather", ("mp",), (4, 3), 1, 48),
    ]
