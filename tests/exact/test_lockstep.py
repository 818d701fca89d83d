"""Collectives of the interpreter are those of devices, on meshes whose axes are named in either order."""

import functools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.exact.lockstep import Collectives

SHAPE, NAMES = (2, 4), ("a", "b")
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
RING = [(s, (s + 1) % 4) for s in range(4)]


def split_rows(x, axes):
    """Returns rows of a replicated array by the device's index."""
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * 2, 2)


# Each is (function of a shard, spec of its input, spec of its result).
CASES = {
    "psum": (lambda x: lax.psum(x, "b"), P("b"), P()),
    "psum of equal copies": (lambda x: lax.psum(lax.pcast(x, "b", to="varying"), "b"), P(), P()),
    "psum of copies along one axis": (
        lambda x: lax.psum(lax.pcast(x, "a", to="varying"), ("a", "b")), P("b"), P()
    ),
    "pmax": (lambda x: lax.pmax(x, "b"), P("b"), P()),
    "index": (lambda x: split_rows(x, ("a", "b")), P(), P(("a", "b"))),
    "index of (b, a)": (lambda x: split_rows(x, ("b", "a")), P(), P(("b", "a"))),
    "ppermute": (lambda x: lax.ppermute(x, "b", RING), P("b"), P("b")),
    "ppermute of one": (lambda x: lax.ppermute(x, "b", [(3, 1)]), P("b"), P("b")),
    "all_gather": (lambda x: lax.all_gather(x, "b", axis=1, tiled=True), P("b"), P("b")),
    "all_gather of (b, a)": (
        lambda x: lax.all_gather(x, ("b", "a"), axis=1, tiled=True), P(("b", "a")), P(("b", "a"))
    ),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True), P("b"), P(None, "b")),
    "all_to_all": (lambda x: lax.all_to_all(x, "b", 1, 0, tiled=True), P("b"), P(None, "b")),
}  # fmt: skip


def compare(function, in_spec, out_spec):
    """Returns the results of the interpreter and of devices."""
    mapped = functools.partial(jax.shard_map, function, in_specs=in_spec, out_specs=out_spec, check_vma=True)
    abstract = AbstractMesh(SHAPE, NAMES, axis_types=(AxisType.Auto,) * 2)
    devices = Mesh(np.array(jax.devices()[:8]).reshape(SHAPE), NAMES)
    return exact.run(mapped(mesh=abstract), X).outputs, jax.jit(mapped(mesh=devices))(X)


@pytest.mark.parametrize("case", CASES)
def test_collective_is_that_of_devices(case):
    got, expected = compare(*CASES[case])
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_index_counts_the_last_axis_fastest():
    """JAX traces an index over two axes as two, so that no program above has it."""
    assert Collectives({"a": 2, "b": 4}, ("b", "a")).index().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
