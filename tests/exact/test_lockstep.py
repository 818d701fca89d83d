"""Blocks and collectives are those of eight devices, for arrays that differ along some mesh axes only."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.exact import interpreter, lockstep
from tests.exact.comparison import describe_difference, vary

SHAPES = {(4, 2): ("a", "b"), (2, 2, 2): ("a", "b", "c")}
ORDERS = {
    (4, 2): ["a", "b", ("a", "b"), ("b", "a")],
    (2, 2, 2): ["b", ("a", "c"), ("c", "a"), ("b", "c"), ("c", "a", "b"), ("a", "b", "c")],
}
SPLITS = {
    (4, 2): [P(), P("a"), P(None, "b"), P("b", "a"), P(("b", "a"))],
    (2, 2, 2): [P(), P("c"), P("a", "c"), P(("c", "a"), "b")],
}


def communicate(x, axes) -> dict:
    """Returns the results of every collective over some axes."""
    size = lax.axis_size(axes)
    parts = x.reshape(size, -1, 2)
    results = {
        "psum": lax.psum(x, axes),
        "psum of integers": lax.psum((x * 100).astype(np.int8), axes),
        "pmean": lax.pmean(x, axes),
        "pmax": lax.pmax(x, axes),
        "pmin": lax.pmin(x.astype(np.int32), axes),
        "axis_index": lax.axis_index(axes),
    }
    for tiled in True, False:
        for axis in 0, 1:
            results[f"all_gather {axis, tiled}"] = lax.all_gather(x, axes, axis=axis, tiled=tiled)
        results[f"psum_scatter {tiled}"] = lax.psum_scatter(x if tiled else parts, axes, tiled=tiled)
        for split, join in (0, 0), (0, 1), (0, 2):
            results[f"all_to_all {split, join, tiled}"] = lax.all_to_all(
                x.reshape(-1, 2, 2) if tiled else parts, axes, split, join, tiled=tiled
            )
    results["psum_scatter along 1"] = lax.psum_scatter(x.reshape(2, -1), axes, scatter_dimension=1, tiled=True)
    results["all_to_all from 1"] = lax.all_to_all(x.reshape(2, -1), axes, 1, 0, tiled=True)
    if getattr(jax.config, "jax_raise_on_ppermute_sort_diff", False) and list(axes) != sorted(axes):
        return results  # JAX 0.12 rejects a ppermute over axes in another order than the mesh's
    results["a ring"] = lax.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])
    results["not all"] = lax.ppermute(x, axes, [(0, size - 1), (1, 0)])
    return results


def in_groups(x) -> dict:
    """Returns collectives of some devices of axis `a`, which has four."""
    groups = [[0, 2], [3, 1]]
    return {name: getattr(lax, name)(x, "a", axis_index_groups=groups) for name in ("psum", "pmax")}


def make_body(shape, check):
    """Returns the function of one device."""

    def body(*blocks):
        results = {}
        for number, x in enumerate(blocks):
            for axes in ORDERS[shape]:
                results |= {f"{name}, {axes}, {number}": y for name, y in communicate(vary(x, axes), axes).items()}
            if shape == (4, 2) and not check:
                results |= {f"{name} in groups, {number}": y for name, y in in_groups(x).items()}
        return {name: y[(None,) * len(shape)] for name, y in results.items()}

    return body


class Program:
    """The results of eight devices, and the program that the interpreter runs."""

    def __init__(self, shape, check: bool):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), SHAPES[shape])
        random = np.random.RandomState(0)
        specs = tuple(SPLITS[shape])
        self.arguments = [_draw(random, spec, mesh.shape) for spec in specs]
        self.program = jax.shard_map(
            make_body(shape, check), mesh=mesh, in_specs=specs, out_specs=P(*mesh.axis_names), check_vma=check
        )
        self.expected = jax.jit(self.program)(*self.arguments)

    def list_differences(self):
        got = exact.run(self.program, *self.arguments).outputs
        for name, y in self.expected.items():
            if difference := describe_difference(got[name], np.asarray(y), 2e-6):
                yield f"{name}: {difference}"


def _draw(random, spec, sizes) -> np.ndarray:
    """Draws an array whose blocks have the shape [8, 4]."""
    shape = [8, 4]
    for axis, names in enumerate(spec):
        for name in names if isinstance(names, tuple) else (names,):
            shape[axis] *= sizes.get(name, 1)
    return random.uniform(-1, 1, shape).astype(np.float32)


@pytest.fixture(scope="module", params=[((4, 2), False), ((2, 2, 2), True)], ids=str)
def program(request):
    return Program(*request.param)


def test_collectives_are_those_of_devices(program):
    assert not list(program.list_differences())


METHODS = "index", "reduce", "gather", "reduce_scatter", "permute", "all_to_all"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("program", [((4, 2), False)], indirect=True, ids=str)
def test_wrong_collective_is_noticed(program, broken, name):
    right = getattr(lockstep.Collectives, name)
    broken(lockstep.Collectives, name, lambda *arguments: np.flip(right(*arguments)) + 1)
    assert list(program.list_differences())


BLOCKS = (  # how an argument is split, and how the result is joined
    (P("a", "b"), P("b", "a")), (P(("a", "b")), P(("b", "a"))), (P(None, ("b", "a")), P("a", "b")),
    (P("b"), P(None, "b")), (P(None, "a"), P("a")), (P(("b", "a")), P(None, ("a", "b"))), (P(), P("a")), (P(), P()),
    (P("a"), P("b", "a")),
)  # fmt: skip


@pytest.fixture(scope="module")
def blocks():
    """Returns a program that joins each argument otherwise than it was split, its arguments and results."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    arguments = [np.random.RandomState(i).randint(0, 99, (16, 24)) for i in range(len(BLOCKS))]
    given, results = zip(*BLOCKS, strict=True)
    program = jax.shard_map(lambda *each: each, mesh=mesh, in_specs=given, out_specs=results)
    return program, arguments, jax.jit(program)(*arguments)


def count_wrong_blocks(program, arguments, expected) -> int:
    run = exact.run(program, *arguments)
    assert not run.disagreements
    return sum(not np.array_equal(x, y) for x, y in zip(run.outputs, expected, strict=True))


def test_blocks_are_those_of_devices(blocks):
    assert count_wrong_blocks(*blocks) == 0


@pytest.mark.parametrize("name", ["split", "join"])
def test_wrong_blocks_are_noticed(blocks, broken, name):
    right = getattr(lockstep, name)

    def reverse(x, rank, spec, mesh):
        return right(x, rank, [axes[::-1] if isinstance(axes, tuple) else axes for axes in spec], mesh)

    broken(interpreter, name, reverse)
    assert count_wrong_blocks(*blocks) > 0


MESH = {"a": 2, "b": 3}


def test_axes_along_which_devices_differ_are_found():
    x = np.zeros((2, 3, 4))
    assert lockstep.find_differing(x, 1, P(), MESH) == {}
    x[1, 0, 2] = 0.5
    assert lockstep.find_differing(x, 1, P(), MESH) == {"a": 0.5, "b": 0.5}
    assert lockstep.find_differing(x, 1, P("b"), MESH) == {"a": 0.5}
    assert lockstep.find_differing(x, 1, P(("b", "a")), MESH) == {}


def test_equal_nans_do_not_differ():
    x = np.full((2, 3, 1), np.nan)
    assert lockstep.find_differing(x, 1, P(), MESH) == {}
    x[0, 0] = 1
    assert set(lockstep.find_differing(x, 1, P(), MESH)) == {"a", "b"}


def test_booleans_and_integers_that_differ_are_found():
    x = np.array([[[True]], [[False]]])
    assert lockstep.find_differing(x, 1, P(), MESH) == {"a": 1.0}
    extremes = np.array([[[0]], [[255]]], np.uint8)
    assert lockstep.find_differing(extremes, 1, P(), MESH) == {"a": 255.0}


def test_index_counts_the_last_axis_fastest():
    """JAX traces an index over two axes as two, so that no program above has it."""
    assert lockstep.Collectives({"a": 2, "b": 4}, ("b", "a")).index().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
