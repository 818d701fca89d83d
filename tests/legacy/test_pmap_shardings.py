"""`pxla.ShardingSpec`: the part of each device, by hand, and XLA's description, which arrays follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.xla_client import HloSharding

from shardformer.legacy import installed
from shardformer.legacy.pmap import pmap
from shardformer.legacy.pmap_shardings import (
    Chunked,
    NoSharding,
    PmapSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    shard_args,
    spec_to_indices,
)

X = np.arange(32).reshape(4, 8)
EVERY = slice(None)


def halves(*axes):
    """Both positions in two chunks, over mesh axes in the given order; a number is a count of copies."""
    mapping = [ShardedAxis(axis) if axis in (0, 1) else Replicated(axis) for axis in axes]
    return ShardingSpec(map(Chunked, ([2], [2])), iter(mapping))


def test_indices_follow_the_mesh():
    low, high, left, right = slice(0, 2), slice(2, 4), slice(0, 4), slice(4, 8)
    rows = ((low, left), (low, right), (high, left), (high, right))
    columns = ((low, left), (high, left), (low, right), (high, right))
    assert spec_to_indices(X.shape, halves(0, 1)) == rows
    assert spec_to_indices(X.shape, halves(1, 0)) == columns
    assert spec_to_indices(X.shape, halves(2, 1, 0)) == columns * 2
    assert halves(2, 1, 0).mesh_shape == (2, 2, 2)


def test_indices_of_unstacked_and_whole_positions():
    stacked = ShardingSpec([Unstacked(2), NoSharding()], [ShardedAxis(0), Replicated(3)])
    assert spec_to_indices((2, 8), stacked) == ((0, EVERY),) * 3 + ((1, EVERY),) * 3
    assert spec_to_indices((4, 8), ShardingSpec([NoSharding()] * 2, [])) == ((EVERY, EVERY),)
    assert spec_to_indices((), ShardingSpec([], [Replicated(3)])) == ((), (), ())
    one = ShardingSpec([Chunked([1]), Chunked([2])], [ShardedAxis(0), ShardedAxis(1)])
    assert spec_to_indices((1, 8), one) == ((EVERY, slice(0, 4)), (EVERY, slice(4, 8)))
    several = ShardingSpec([Chunked([2, 2]), NoSharding()], [ShardedAxis(1), ShardedAxis(0)])
    starts = [index[0].start for index in spec_to_indices(X.shape, several)]
    assert starts == [0, 2, 1, 3]


@pytest.mark.parametrize("split", [Chunked([3]), Chunked([2, 2]), Unstacked(6)])
def test_a_split_that_loses_elements_is_an_error(split):
    spec = ShardingSpec([split], map(ShardedAxis, range(2 if split == Chunked([2, 2]) else 1)))
    with pytest.raises(ValueError, match="position of size 7; give"):
        spec_to_indices((7,), spec)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (2, 0, 1), (1, 2, 0)])
def test_description_of_xla_gives_the_same_parts(axes):
    spec = halves(*axes)
    devices = jax.devices()[: int(np.prod(spec.mesh_shape))]
    with installed():
        sharding = jax.sharding.GSPMDSharding(devices, spec.sharding_proto())
    x = jax.device_put(X, sharding)
    parts = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    for device, index in zip(devices, spec_to_indices(X.shape, spec), strict=True):
        np.testing.assert_array_equal(parts[device], X[index])


def test_description_of_copies_only():
    assert ShardingSpec([NoSharding()], [Replicated(4)]).sharding_proto() == HloSharding.replicate()


def test_arguments_in_parts():
    spec, devices = ShardingSpec([Unstacked(4), NoSharding()], [ShardedAxis(0)]), jax.devices()[:4]
    (parts,) = shard_args(devices, [spec_to_indices(X.shape, spec)], [None], [X])
    assert [part.device for part in parts] == devices
    np.testing.assert_array_equal(np.stack(parts), X)


def test_layout_of_a_spec_has_its_parts():
    spec = ShardingSpec([Unstacked(4), Chunked([2])], [ShardedAxis(1), ShardedAxis(0)])
    x = jax.device_put(X, PmapSharding(jax.devices(), spec))
    indices = dict(zip(jax.devices(), spec_to_indices(X.shape, spec), strict=True))
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data[0], X[indices[shard.device]])


def test_layout_of_a_pmap_is_an_instance():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    on_mesh = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    pmapped = pmap(lambda x: x)(np.ones((2, 3)))
    shardings = (pmapped.sharding, PmapSharding.default((2, 3)), pmapped.sum(0).sharding, on_mesh, jnp.ones(2).sharding)
    assert [isinstance(sharding, PmapSharding) for sharding in shardings] == [True, True, False, False, False]
