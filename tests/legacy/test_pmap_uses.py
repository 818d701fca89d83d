"""Uses of pmap that today's jax rejects: `legacy` runs them or names them, and `--check` finds them."""

import copy
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.legacy import array_members, pmap_uses
from shardformer.legacy.install import installed
from shardformer.legacy.migration.shard_map_helpers import jit_on_one_device
from shardformer.legacy.removed_uses import find_removed_uses
from tests.legacy.migrated_code import load, migrated

AXIS = "jax.pmap(axis_name=Enum.member)"
MIXED = "import jax\nstep = jax.pmap(f)\nadd = jax.jit(g)\ngradient = step(x)\nplaced = jax.device_put(w, cpu)\n"
OWN_ENUM = "import enum, jax\nclass Axes(enum.Enum):\n  model = 1\n"


class Axes(enum.Enum):
    model = enum.auto()


class Others(enum.Enum):
    model = enum.auto()


def sum_and_number(x):
    return jax.lax.psum(x, Axes.model) + jax.lax.pmean(x, (Axes.model,)), jax.lax.axis_index(Axes.model)


def test_a_member_of_an_enum_names_an_axis():
    x = jnp.arange(2.0)
    with installed():
        total, index = jax.pmap(sum_and_number, axis_name=Axes.model, global_arg_shapes=None)(x)
        assert total.tolist() == [1.5, 1.5]
        assert index.tolist() == [0, 1]
        with pytest.raises(NameError, match=r"Axes\.other"):
            jax.eval_shape(jax.pmap(lambda x: jax.lax.psum(x, "Axes.other"), axis_name=Axes.model), x)
    with pytest.raises(TypeError):  # jax keeps the meshes of Axes
        jax.pmap(lambda x: x, axis_name=Others.model)(x)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import jax\nfrom constants import Axes\njax.pmap(f, axis_name=Axes.model)", True),
        ("import jax, constants\njax.pmap(f, constants.Axes.model)", True),
        ("from functools import partial\nimport jax\nfrom c import A\npartial(jax.pmap, axis_name=A.x)(f)", True),
        (f"{OWN_ENUM}jax.pmap(f, axis_name=Axes.model)", True),
        (f"{OWN_ENUM.replace('enum.Enum', 'str, enum.Enum')}jax.pmap(f, axis_name=Axes.model)", False),
        ("import jax\nclass Axes:\n  model = 'm'\njax.pmap(f, axis_name=Axes.model)", False),
        ("import jax\njax.pmap(f, axis_name=self.axis)\njax.pmap(f, axis_name='i')\njax.vmap(f, axis_name=A.x)", False),
    ],
)
def test_check_finds_axes_named_by_an_enum(source, found):
    uses = [use for use in find_removed_uses(source) if use.name == AXIS]
    assert [use.status for use in uses] == (["covered"] if found else [])


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("add(gradient, placed)", True),
        ("jax.jit(g)(step(x), jax.device_put(w, device=cpu))", True),
        ("@jax.jit\ndef h(x): return jax.device_put(x, jax.devices()[0])", True),
        ("def h(x): return jax.device_put(x, jax.devices()[0])\nh = jax.jit(lambda x: h(x))", False),
        ("def h(x): return jax.device_put(x, jax.devices()[0])\njax.jit(h, static_argnums=1)", True),
        ("@jax.jit\ndef h(x): return jax.device_put(x, sharding)", False),
        ("@jax.jit\ndef h(x):\n  d = jax.local_devices()\n  e = d[1]\n  return jax.device_put(x, device=e)", True),
        ("cpu = jax.devices('cpu')[0]\n@jax.jit\ndef h(x): return jax.device_put(x, cpu)", True),
        ("cpu = jax.devices('cpu')[0]\n@jax.jit\ndef h(x, cpu): return jax.device_put(x, cpu)", False),
        ("@jax.jit\ndef h(x): return jax.device_put(x, sharding) / len(jax.devices())", False),
        ("@jax.jit\ndef h(x): return jax.device_put(x, NamedSharding(Mesh(jax.devices(), 'x'), P()))", False),
        ("@jax.jit\ndef h(x): return jax.device_put(x, meshes()[0]), jax.devices()[0]", False),
        ("@jax.jit\ndef h(x): return jax.device_put(x, jax.devices()[:2])", False),
        ("@jax.jit\nasync def h(x): return jax.device_put(x, jax.devices()[0])", False),
        ("add(gradient, w)", False),
        ("add(x, placed)", False),
        ("g(gradient, placed)", False),
        ("add(gradient, jax.device_put(w))", False),
    ],
)
def test_check_finds_a_result_of_pmap_that_meets_one_device(call, found):
    uses = [use for use in find_removed_uses(MIXED + call) if use.name == pmap_uses.MIXED]
    assert [use.status for use in uses] == (["covered"] if found else [])


@pytest.mark.parametrize(
    ("mapped", "found"),
    [
        ("", False),
        ("jax.pmap(h)", True),
        ("from jax import pmap as parallel\nparallel(h)", True),
        ("import jax as j\nfrom functools import partial\n@partial(j.pmap, axis_name='i')\ndef g(x): pass", True),
        ("import other\nother.pmap(h)", False),
        ("from other import pmap\npmap(h)", False),
        ("def g(pmap): pmap(h), h.pmap", False),
    ],
)
def test_a_move_inside_of_a_jit_counts_only_with_a_pmap(mapped, found):
    source = f"import jax\n@jax.jit\ndef h(x): return jax.device_put(x, jax.devices()[0])\n{mapped}"
    assert [use.line for use in find_removed_uses(source)] == [3] * found


UPDATE = """
import jax, jax.numpy as jnp
from functools import partial

@partial(jax.jit, static_argnums=2)
def update(gradients, weights, rate):
    mean = jax.device_put(jax.tree_util.tree_map(lambda x: x.mean(0), gradients), jax.devices()[1])
    return {"w": weights["w"] - rate * mean["w"]}, jax.tree_util.tree_map(jnp.zeros_like, gradients)

def train(add=jax.pmap(lambda total, x: {"w": total["w"] + x}), x=jnp.arange(8.0)):
    weights, total = {"w": jax.device_put(jnp.float32(1), jax.devices()[1])}, {"w": jnp.zeros(8)}
    for _ in range(2):
        weights, total = update(add(total, x), weights, 0.5)
    return weights["w"], add(total, x)["w"]
"""


def assert_trained(results):
    weight, total = results
    assert float(weight) == -2.5
    assert weight.devices() == {jax.devices()[1]}
    assert total.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_results_of_pmap_go_to_the_device_of_the_others():
    with installed():
        assert_trained(load(UPDATE)["train"]())
    with pytest.raises(ValueError, match="incompatible devices"):
        load(UPDATE)["train"]()


@pytest.mark.usefixtures("helpers")
def test_migrated_jit_takes_results_of_pmap_to_one_device(tmp_path):
    found = migrated(tmp_path, UPDATE)
    assert "@partial(jit_on_one_device, static_argnums=2)" in found.migrated
    assert (found.undecided, find_removed_uses(found.migrated)) == ([], [])
    assert_trained(load(found.migrated)["train"]())


@pytest.mark.usefixtures("helpers")
def test_migrated_jit_of_two_calls_is_rewritten_once(tmp_path):
    found = migrated(tmp_path, f"{MIXED}add(gradient, placed)\nadd(step(x), placed)\n")
    assert found.migrated.count("jit_on_one_device(g)") == 1
    assert migrated(tmp_path, found.migrated).migrated == found.migrated


def pmapped(dtype=jnp.float32):
    return jax.pmap(lambda x: x * 2)(jnp.arange(4, dtype=dtype))


def on_device(number, value=1.0):
    return jax.device_put(value, jax.devices()[number])


@jax.numpy_dtype_promotion("standard")
def test_arrays_that_move_to_one_device_keep_their_types():
    multiply, half = jit_on_one_device(jnp.multiply), pmapped(jnp.bfloat16)
    weak = on_device(1, jax.jit(lambda: jnp.full(4, 2.0))())
    assert (weak.weak_type, weak.dtype) == (True, jnp.float32)
    product = multiply(half, weak)
    assert (product.dtype, product.tolist(), product.devices()) == (jnp.bfloat16, [0, 4, 8, 12], {jax.devices()[1]})
    assert multiply(half, on_device(1, np.full(4, 2, np.float32))).dtype == jnp.float32
    halves = on_device(1, np.ones(4, jnp.bfloat16))
    weak_on_four = jax.device_put(weak, half.sharding)
    assert multiply(weak_on_four, halves).dtype == jnp.bfloat16
    assert not multiply(half, halves).committed


def test_typed_keys_move_to_one_device():
    data = jit_on_one_device(lambda keys, x: jax.random.key_data(keys) + x[0].astype(jnp.uint32))
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    for number, x in ((0, on_device(1, np.zeros(4))), (1, pmapped())):
        result = data(jax.device_put(keys, jax.devices()[1] if number else pmapped().sharding), x)
        assert np.array_equal(result, jax.random.key_data(keys))
        assert (result.devices(), result.committed) == ({jax.devices()[1]}, False)


def test_only_a_committed_array_moves_others_to_its_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("of the program",))
    on_mesh = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    add = jit_on_one_device(lambda *arrays: sum(arrays))
    assert add(on_mesh, jnp.ones(())).devices() == set(jax.devices()[:4])
    with pytest.raises(ValueError, match="incompatible devices"):
        add(pmapped(), on_device(1), on_device(2))
    assert add(on_mesh, on_device(1), jnp.ones(())).devices() == {jax.devices()[1]}
    assert add(on_mesh, jnp.ones(())).devices() == set(jax.devices()[:4])


def test_returned_results_are_donated_and_stay_on_a_device():
    step = jit_on_one_device(jnp.add, donate_argnums=1)
    total = step(pmapped(), on_device(1, jnp.ones(4)))
    again = step(pmapped(), total)
    assert total.is_deleted()
    assert (again.tolist(), again.devices()) == ([1, 5, 9, 13], {jax.devices()[1]})
    assert jax.pmap(lambda x: x)(again).tolist() == [1, 5, 9, 13]


def test_jit_on_one_device_has_the_members_of_jit():
    add = jit_on_one_device(sum_of_two)
    arguments = pmapped(), on_device(1)
    assert add.lower(*arguments).compile()(*map(np.asarray, arguments)).tolist() == [1, 3, 5, 7]
    assert add(*arguments).tolist() == [1, 3, 5, 7]
    assert (add._cache_size(), add.clear_cache(), add._cache_size()) == (1, None, 0)
    assert add.eval_shape(*arguments).shape == (4,)
    assert (add.__name__, add.__wrapped__) == ("sum_of_two", sum_of_two)
    assert copy.copy(add)(*arguments).tolist() == [1, 3, 5, 7]
    with pytest.raises(AttributeError, match="no_member"):
        add.no_member  # noqa: B018


def test_jit_of_a_migrated_jit_lowers_itself():
    doubled = jax.jit(jax.grad(jit_on_one_device(lambda x: x**2)))
    assert doubled.lower(1.0).compile()(jnp.float32(3)) == 6
    outer = jit_on_one_device(jax.grad(jit_on_one_device(lambda x: x**2)))
    assert outer.lower(1.0).compile()(jnp.float32(3)) == 6


def test_a_method_is_jitted_on_one_device():
    class Scale:
        @functools.partial(jit_on_one_device, static_argnums=0)
        def add(self, x, y):
            return x + y

    assert Scale().add(pmapped(), on_device(1)).tolist() == [1, 3, 5, 7]


def sum_of_two(x, y):
    return x + y


def test_arrays_of_a_mesh_of_the_program_stay_an_error():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("of the program",))
    on_two = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with installed():
        on_one = jax.device_put(jnp.ones(2), jax.devices()[0])
        with pytest.raises(ValueError, match="incompatible devices"):
            jax.jit(jnp.add)(on_two, on_one)
        repeated = jax.device_put_replicated(jnp.ones(2), jax.devices()[:3])
        pmapped = jax.pmap(jnp.sin, "named")(jnp.zeros(8))
        assert jax.jit(lambda a, b: a.sum() + b[0])(repeated, on_two).devices() == set(mesh.devices.flat)
        assert jax.jit(lambda a, b: a.sum() + b[0])(repeated, pmapped).devices() == {jax.devices()[0]}


def test_a_jitted_function_keeps_its_members():
    with installed():
        jitted = jax.jit(sum_and_number)
        assert jitted.__wrapped__ is sum_and_number
        assert jitted._cache_size() == 0
        assert jax.jit(jnp.sin).lower(1.0).compile()(1.0) == jnp.sin(1.0)


def test_error_about_devices_says_what_to_write():
    on_two = jax.pmap(lambda x: x)(jnp.ones(2))
    for other, advised in ((jax.device_put(jnp.ones(2), jax.devices()[0]), True), (jnp.ones(3), False)):
        with pytest.raises((ValueError, TypeError)) as error:
            jax.jit(jnp.add)(on_two, other)
        array_members.advise(error.value)
        assert any("jax.device_put" in note for note in getattr(error.value, "__notes__", [])) == advised
