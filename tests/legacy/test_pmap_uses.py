"""Uses of pmap that today's jax rejects: `legacy` runs them or names them, and `--check` finds them."""

import enum

import jax
import jax.numpy as jnp
import pytest

from shardformer.legacy import array_members, pmap_uses
from shardformer.legacy.install import installed
from shardformer.legacy.removed_uses import find_removed_uses

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
        ("add(gradient, w)", False),
        ("add(x, placed)", False),
        ("g(gradient, placed)", False),
        ("add(gradient, jax.device_put(w))", False),
    ],
)
def test_check_finds_a_result_of_pmap_that_meets_one_device(call, found):
    uses = [use for use in find_removed_uses(MIXED + call) if use.name == pmap_uses.MIXED]
    assert [use.status for use in uses] == (["not covered"] if found else [])


def test_error_about_devices_says_what_to_write():
    on_two = jax.pmap(lambda x: x)(jnp.ones(2))
    for other, advised in ((jax.device_put(jnp.ones(2), jax.devices()[0]), True), (jnp.ones(3), False)):
        with pytest.raises((ValueError, TypeError)) as error:
            jax.jit(jnp.add)(on_two, other)
        array_members.advise(error.value)
        assert any("jax.device_put" in note for note in getattr(error.value, "__notes__", [])) == advised
