"""Names of notebooks, of named shapes, of layouts and of abstract values that `install()` puts back."""

import contextlib
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import xla_client

from shardformer.legacy import array_members, replacements
from shardformer.legacy.gspmd_sharding import GSPMDSharding
from shardformer.legacy.install import installed
from shardformer.legacy.migration import shard_map_helpers
from shardformer.legacy.removed_uses import find_removed_uses

MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
NOTEBOOK = """
import jax.tools.colab_tpu
jax.tools.colab_tpu.setup_tpu()
from jax.experimental import array_api as xp
import jax.experimental.array_api
from jax.core import as_named_shape, raise_to_shaped, raise_to_shaped_mappings
from jax.sharding import GSPMDSharding
from jax.experimental.sharding import OpShardingSharding
assert xp.__array_api_version__ and jax.experimental.array_api.sum is jax.numpy.sum
"""


def test_a_notebook_finds_the_names_while_installed_and_only_then():
    with installed():
        exec(NOTEBOOK, {})
    with pytest.raises(ImportError):
        exec(NOTEBOOK, {})


def test_check_lists_the_names_as_covered():
    uses = find_removed_uses(NOTEBOOK)
    assert {use.status for use in uses} == {"covered"}
    assert {"jax.tools.colab_tpu.setup_tpu", "jax.core.raise_to_shaped", "jax.sharding.GSPMDSharding"} <= {
        use.name for use in uses}  # fmt: skip


def test_shapes_and_abstract_values_are_what_they_were():
    with installed():
        named = jax.core.as_named_shape((2, 3))
        assert (named, named.rank, list(named.names)) == ((2, 3), 2, [])
        assert jax.core.as_named_shape(named) is named
        assert jax.random.normal(jax.random.PRNGKey(0), named).shape == (2, 3)
        aval = jax.core.ShapedArray((2,), jnp.float32)
        assert jax.core.raise_to_shaped(aval) is aval
        assert jax.core.raise_to_shaped(aval, weak_type=True).weak_type
        assert not aval.weak_type


@pytest.mark.parametrize("spec", [("a", "b"), ("b", "a"), (("a", "b"),), (None, "b"), (("b", "a"), None), ("a",), ()])
def test_a_layout_of_xla_is_a_named_sharding(spec):
    """jax's own sharding, written as XLA writes it, comes back with the same parts on the same devices."""
    own = NamedSharding(MESH, PartitionSpec(*spec))
    description = own._to_xla_hlo_sharding(2)
    for given in (description, description.to_proto()):
        result = GSPMDSharding(list(MESH.devices.flat), given)
        assert result.devices_indices_map((8, 16)) == own.devices_indices_map((8, 16))


def test_replicated_layouts_are_made_by_name():
    devices = jax.devices()[:2]
    replicated = GSPMDSharding.get_replicated(devices)
    assert replicated.is_fully_replicated
    assert GSPMDSharding(devices, xla_client.HloSharding.replicate()) == replicated
    assert not isinstance(replicated, GSPMDSharding)


def test_a_compiled_program_runs_with_jit_disabled():
    x = np.arange(4.0)
    compiled = jax.jit(lambda x: 2 * x).lower(x).compile()
    with jax.disable_jit():
        with installed():
            assert compiled(x).tolist() == [0, 2, 4, 6]
        with pytest.raises(ValueError, match="Disable jit is not supported"):
            compiled(x)


def test_dialect_mhlo_is_stablehlo_today():
    lowered = jax.jit(lambda x: 2 * x).lower(jnp.ones(2))
    with installed():
        assert lowered.as_text("mhlo") == lowered.as_text() != lowered.as_text(dialect="hlo")
        assert "stablehlo.multiply" in str(lowered.compiler_ir(dialect="mhlo"))
        assert "multiply" in lowered.compile().compiler_ir()[0].to_string()
        with pytest.raises(ValueError, match="unknown dialect: lhlo"):
            lowered.as_text("lhlo")
    with pytest.raises(ValueError, match="unknown dialect: mhlo"):
        lowered.as_text("mhlo")


def test_device_can_be_called_and_is_jax_own():
    second = jax.devices()[1]
    x = jax.device_put(jnp.ones((1, 2)), second)
    of_many = jax.device_put(x, NamedSharding(MESH, PartitionSpec()))
    with installed():
        for _ in range(20):  # Python replaces instructions that run often
            called, read = x.device(), x.device  # outside of an assert, which pytest rewrites
            assert called is read is second
        assert jax.device_put(x, x.device).sharding == x.sharding
        device = jax.pmap(lambda row: 2 * row, devices=[x.device])(x).device_buffers[0].device()
        assert device is second
        assert of_many.device == of_many.sharding
        with pytest.raises(ValueError, match=r"on 8 devices; call x.devices\(\)"):
            of_many.device()
    with pytest.raises(TypeError, match="not callable"):
        x.device()


def test_a_call_of_device_that_nobody_sees_is_advised():
    x = jnp.ones(2)
    with installed():
        of_many = jax.device_put(x, NamedSharding(MESH, PartitionSpec()))
        for array, advice in ((x, "device = x.device()"), (of_many, "devices = x.devices()")):
            for call in (operator.attrgetter("device"), lambda array: array.device(*())):
                with pytest.raises(TypeError, match="not callable") as caught:
                    call(array)()
                array_members.advise(caught.value)
                assert advice in caught.value.__notes__[0]


def test_an_array_of_one_value_is_a_number():
    row = jax.pmap(lambda x: x + 1)(jnp.ones((1, 1)))
    with installed():
        assert (int(row), float(row), complex(row), float(jnp.float32(3))) == (2, 2.0, 2 + 0j, 3.0)
        with pytest.raises(TypeError, match="Only scalar arrays"):
            float(jnp.ones(2))
        with pytest.raises(TypeError, match="0-dimensional") as caught:
            float(np.ones(1))
        array_members.advise(caught.value)
        assert "x.item()" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="Only scalar arrays"):
        float(row)


def test_partition_spec_equals_its_tuple():
    spec, entries = PartitionSpec("a", None, ("b", "c")), ("a", None, ("b", "c"))
    with installed():
        assert spec == entries
        assert entries == spec
        assert spec != entries[:2]
        assert spec != PartitionSpec("a")
        assert {spec: 1}[entries] == {entries: 1}[spec] == len({spec, entries}) == 1
        for options in ({"unreduced": {"d"}}, {"reduced": {"d"}}):
            assert PartitionSpec(*entries, **options) not in (spec, entries)
    assert entries not in {spec: 1}
    assert spec != entries


def test_jit_tells_specs_of_the_same_entries_apart():
    specs = [PartitionSpec("a"), PartitionSpec("a", unreduced={"b"}), PartitionSpec("a", reduced={"b"})]
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def unreduced(spec):
        traced.append(spec)
        return len(spec.unreduced) + 2 * len(spec.reduced)

    for context in (contextlib.nullcontext(), installed(), contextlib.nullcontext()):
        with context:
            assert [int(unreduced(spec)) for spec in (*specs, *specs)] == [0, 1, 2, 0, 1, 2]
    assert set(map(id, traced)) == set(map(id, specs))
    assert len(traced) <= 6  # once for each of the two hashes


@pytest.mark.parametrize("home", [replacements, shard_map_helpers])
@pytest.mark.parametrize("places", [[0, 0, 0, 0], [3, 2, 1, 0]])
def test_arrays_over_devices(home, places):
    devices = jax.devices()[:4]
    trees = [{"x": jax.device_put(jnp.full(2, i), devices[place])} for i, place in enumerate(places)]
    sharded = home.device_put_sharded(trees, devices)["x"]
    replicated = home.device_put_replicated({"x": jnp.arange(2)}, devices)["x"]
    assert home.device_put_sharded([1.5, 2.5], devices[:2]).tolist() == [1.5, 2.5]
    for i, device in enumerate(devices):
        for array, row in ((sharded, [i, i]), (replicated, [0, 1])):
            (shard,) = (shard for shard in array.addressable_shards if shard.device == device)
            assert shard.data.tolist() == [row]
    with pytest.raises(ValueError, match=r"got 3 for 4|longer"):
        home.device_put_sharded(trees[:3], devices)


@pytest.mark.parametrize("home", [replacements, shard_map_helpers])
@jax.numpy_dtype_promotion("standard")
def test_arrays_over_devices_in_a_jit_and_of_mixed_types(home):
    devices = jax.devices()[:2]
    x = jnp.arange(2)
    copies = jax.jit(lambda x: home.device_put_replicated(x, devices))(x)
    mixed = jax.jit(lambda x: home.device_put_sharded([x, 0.5 * x], devices))(x)
    assert (copies.tolist(), mixed.tolist()) == ([[0, 1], [0, 1]], [[0, 1], [0, 0.5]])
    for shards in ([x, 0.5 * x], [1, 2.5], [jnp.int8(1), 2], [np.float64(1), jnp.bfloat16(2)]):
        stacked = jnp.stack([jnp.asarray(shard) for shard in shards])
        array = home.device_put_sharded(shards, devices)
        assert (array.dtype, array.tolist()) == (stacked.dtype, stacked.tolist())
    keys = home.device_put_sharded(list(jax.random.split(jax.random.key(0))), devices)
    assert (keys == jax.random.split(jax.random.key(0))).all()
