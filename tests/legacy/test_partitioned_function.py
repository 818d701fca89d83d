"""custom_partitioning without the mesh in its callbacks, and with no rule for Shardy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import custom_partitioning as today
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.legacy import installed
from shardformer.legacy.partitioned_function import custom_partitioning

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
X = np.arange(128, dtype=np.float32).reshape(8, 16) % 7
Y = np.arange(256, dtype=np.float32).reshape(16, 16) % 5


def entries(shape) -> list:
    return [*shape.sharding.spec, *[None] * len(shape.shape)][: len(shape.shape)]


def without_last(mesh, shape) -> NamedSharding:
    return NamedSharding(mesh, P(*entries(shape)[:-1], None))


def infer_rows(mesh, operands, result, is_optional=True):
    if entries(operands[0]["x"])[-1] is not None:
        raise ValueError("the rows are split")
    return without_last(mesh, operands[0]["x"])


def sums(partitioning, with_mesh=True, infer=infer_rows, **options):
    """Returns a function that needs complete rows, which XLA has to keep on one device, and the shapes it saw."""
    seen = []

    def without_mesh(operands, result, is_optional=True):
        seen.append(operands[0]["x"].sharding.shard_shape(operands[0]["x"].shape))
        rows = without_last(MESH, operands[0]["x"])
        return lambda tree: jnp.cumsum(tree["x"], -1), rows, ({"x": rows},)

    def partition(mesh, operands, result):
        return mesh, *without_mesh(operands, result)

    @partitioning
    def running_sums(tree):
        return jnp.cumsum(tree["x"], -1)

    if with_mesh:
        running_sums.def_partition(partition, infer, **options)
    else:
        running_sums.def_partition(without_mesh, functools.partial(infer, MESH), **options)
    return running_sums, seen


@pytest.mark.parametrize("with_mesh", [False, True])
def test_layout_follows_the_callback(with_mesh):
    function, seen = sums(custom_partitioning, with_mesh)
    x = jax.device_put(X, NamedSharding(MESH, P("x", "y")))
    result = jax.jit(lambda x: 2 * function({"x": x}))(x)
    np.testing.assert_array_equal(result, 2 * np.cumsum(X, -1))
    assert result.sharding.is_equivalent_to(NamedSharding(MESH, P("x")), 2)
    assert seen[-1][0] == 2  # a fourth of the 8 rows
    np.testing.assert_array_equal(function({"x": X}), np.cumsum(X, -1))


def test_jax_itself_needs_a_rule():
    function, _ = sums(today.custom_partitioning)
    with pytest.raises(NotImplementedError, match="Need to provide sharding_rule"):
        jax.jit(function)({"x": X})


def test_a_given_rule_stays():
    x = jax.device_put(X, NamedSharding(MESH, P("x")))
    asked = []

    def infer(*arguments):
        asked.append(arguments)
        return infer_rows(*arguments)

    given, _ = sums(custom_partitioning, infer=infer, sharding_rule="i j -> i j")
    np.testing.assert_array_equal(jax.jit(given)({"x": x}), np.cumsum(X, -1))
    assert asked == []
    inferred, _ = sums(custom_partitioning, infer=infer)
    np.testing.assert_array_equal(jax.jit(inferred)({"x": x}), np.cumsum(X, -1))
    assert asked


def test_operands_share_positions_and_an_argument_is_static():
    seen = []

    def infer(scale, operands, results):
        x, y = map(entries, operands)
        product = NamedSharding(operands[0].sharding.mesh, P(x[0], y[1]))
        return product, product

    def partition(scale, operands, results):
        seen.append((scale, [tuple(entries(shape)) for shape in operands]))
        mesh = operands[0].sharding.mesh

        def product(x, y):
            part = jax.lax.psum(x @ y, "y")
            return scale * part, part

        split = NamedSharding(mesh, P("x"))
        return product, (split, split), (NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("y")))

    @functools.partial(custom_partitioning, static_argnums=(2,))
    def product(x, y, scale=1):
        return scale * (x @ y), x @ y

    product.def_partition(partition, infer)
    x, y = (jax.device_put(z, NamedSharding(MESH, spec)) for z, spec in ((X, P("x", "y")), (Y, P("y"))))
    scaled, plain = jax.jit(lambda x, y: product(x, y, scale=3))(x, y)
    np.testing.assert_array_equal(scaled, 3 * (X @ Y))
    np.testing.assert_array_equal(plain, X @ Y)
    assert scaled.sharding.is_equivalent_to(NamedSharding(MESH, P("x")), 2)
    assert seen[-1] == (3, [("x", "y"), ("y", None)])


def test_one_layout_for_all_operands():
    def infer(operands, result):
        return NamedSharding(MESH, P("x"))

    def partition(operands, result):
        split = NamedSharding(MESH, P("x"))
        return lambda x: 2 * x, split, (split,)

    @custom_partitioning
    def double(x):
        return 2 * x

    double.def_partition(partition, infer)
    x = jax.device_put(X, NamedSharding(MESH, P(None, "x")))
    np.testing.assert_array_equal(jax.jit(double, out_shardings=NamedSharding(MESH, P("x")))(x), 2 * X)


def find_rule(fun, infer) -> str:
    """Returns the rule for Shardy of a function of 6 rows; the axes have 4 and 2 devices."""
    function = custom_partitioning(fun)
    function.def_partition(lambda operands, result: None, infer)
    rows = jax.ShapeDtypeStruct((6, 3), jnp.float32, sharding=NamedSharding(MESH, P("y")))
    return re.search(r"op_sharding_rule<(\(.*?) {", jax.jit(function).lower(rows).as_text())[1]


def infer_divided(operands, result):
    operands[0].sharding.shard_shape((6, 3))  # a ValueError where "x" splits the rows
    return NamedSharding(MESH, P(entries(operands[0])[0]))


def infer_second_axis(operands, result):
    return NamedSharding(MESH, P("y" if "y" in entries(operands[0])[:1] else None))


@pytest.mark.parametrize("infer", [infer_divided, infer_second_axis])
def test_the_second_axis_of_the_mesh_is_asked_for_too(infer):
    assert find_rule(jnp.sin, infer) == "([i, j])->([i, k])"


def test_a_position_that_two_follow_has_one_of_them():
    def infer(operands, result):
        axes = {axis for axis in entries(operands[0]) if axis}
        return NamedSharding(MESH, P("x" if "x" in axes else None, "y" if "y" in axes else None))

    assert find_rule(jnp.sin, infer) == "([i, j])->([i, j])"


def test_a_result_without_a_layout_has_its_place():
    def infer(operands, result):
        return None, NamedSharding(MESH, P(entries(operands[0])[0]))

    assert find_rule(lambda x: (x, 2 * x), infer) == "([i, j])->([k, l], [i, m])"


def test_an_error_at_every_layout_is_raised():
    def infer(operands, result):
        raise ValueError("a mistake")

    def infer_whole(operands, result):
        assert entries(operands[0]) == [None, None]
        return NamedSharding(MESH, P())

    with pytest.raises(ValueError, match="a mistake"):
        find_rule(jnp.sin, infer)
    assert find_rule(jnp.sin, infer_whole) == "([i, j])->([k, l])"


def test_it_is_what_old_code_imports():
    with installed():
        from jax.experimental.custom_partitioning import custom_partitioning as imported

        assert imported is custom_partitioning
    assert not issubclass(today.custom_partitioning, custom_partitioning)
