"""The errors of xmap about invalid arguments and about its body."""

import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from shardformer.legacy import mesh, xmap
from shardformer.legacy.pjit import pjit, with_sharding_constraint
from tests.legacy.test_xmap import ROWS, devices, double


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: xmap(double, "i", ["i", ...]),
            TypeError,
            "in_axes is 'i'; a spec is a list of axis names for the leading positions (['i', ...], or ['i'] to assert "
            "the rank) or a dict from positions to names ({0: 'i'})",
        ),
        (
            lambda: xmap(double, (["i", ...], {"w": "j"}), ["i", ...]),
            TypeError,
            "in_axes[1]['w'] is 'j'",
        ),
        (lambda: xmap(double, [...], [...], axis_sizes=[8]), TypeError, "axis_sizes is [8]; it is a dict by axis name"),
        (
            lambda: xmap(double, ["i", ...], ["i", ...], axis_resources={"i": {"x"}}),
            TypeError,
            "axis_resources gives the axis 'i' {'x'}; a resource is the name of a mesh axis",
        ),
        (
            lambda: xmap(double, ["i", ...], ["i", ...], axis_resources={"i": None}),
            TypeError,
            "axis_resources gives the axis 'i' None; a resource is the name of a mesh axis",
        ),
        (
            lambda: xmap(double, ["i", ...], ["i", ...], donate_argnums="a"),
            TypeError,
            "donate_argnums is 'a'; it is an argument's number, or a tuple of them",
        ),
        (
            lambda: xmap(lambda x, y: x, (["i", ...], ["i", ...]), ["i", ...])({"w": ROWS}, ROWS[:3]),
            ValueError,
            "the axis 'i' has size 4 in argument [0]['w'], but size 3 in argument [1] (spec ['i', ...], shape (3, 3), "
            "position 0); give both the same size",
        ),
        (
            lambda: xmap(double, ({"w": ["i", ...]},), ["i", ...])({"v": ROWS}),
            ValueError,
            "in_axes[0]['w'] has a spec, ['i', ...], but ({'v': *},) has nothing at that path",
        ),
        (
            lambda: xmap(double, ({"w": ["i", ...]},), ["i", ...])({"v": ROWS, "w": ROWS}),
            ValueError,
            "in_axes has no spec for the array at [0]['v']",
        ),
        (
            lambda: xmap(lambda x: {"a": x, "b": x}, ["i", ...], {"a": ["i", ...]})(ROWS),
            ValueError,
            "out_axes has no spec for the array at ['b']",
        ),
        (
            lambda: xmap(double, ["i", "j", ...], ["i", ...])(np.ones(4, np.float32)),
            ValueError,
            "argument [0] has the spec ['i', 'j', ...], which has 'j' at position 1, but its shape is (4,) (rank 1)",
        ),
        (
            lambda: xmap(double, ["i", ...], ["i", ...], axis_resources={"i": "x"})(ROWS),
            ValueError,
            "axis_resources puts the axis 'i' on 'x', but no mesh is in scope; call inside "
            "`with Mesh(devices, (..., 'x')):`, or leave the axis without resources",
        ),
        (
            lambda: xmap(lambda: 1, (), [...], axis_resources={"i": "x"}, strict=True),
            ValueError,
            "axis_resources has 'i', which nothing defines; an axis comes from in_axes or axis_sizes, and those have "
            "none",
        ),
        (lambda: xmap(3, ["i"], ["i"]), TypeError, "xmap got 3 as its function, which cannot be called"),
    ],
)
def test_messages_name_the_place_and_the_fix(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


def test_an_axis_that_does_not_divide_says_over_what():
    split = xmap(double, ["i", ...], ["i", ...], axis_resources={"i": ("x", "y")})
    with (
        mesh(devices(4, 2), ("x", "y")),
        pytest.raises(ValueError, match=r"'i' has size 4, which is not divisible by the 8 parts .*'x', 'y'"),
    ):
        split(ROWS)


def test_a_result_that_varies_is_told_once_for_each_program():
    first = xmap(double, ["i", ...], [...])
    with pytest.warns(UserWarning, match=r"the xmapped double varies .* index 0"):
        np.testing.assert_array_equal(first(ROWS), 2 * ROWS[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first(ROWS)
        xmap(lambda x: lax.psum(x, "i"), ["i", ...], [...])(ROWS)


def test_the_users_own_errors_come_through():
    def body(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        xmap(body, ["i", ...], ["i", ...])(ROWS)


def last_line(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].line


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (lambda x: x + jnp.ones(5), TypeError, "incompatible shapes"),
        (lambda x: jnp.einsum("i,i->", x, jnp.ones(5)), ValueError, "Size of label 'i'"),
        (lambda x: lax.psum(x, "shrd"), NameError, "unbound axis name: shrd (in the xmapped <lambda>, where the named "
         "axes in scope are 'batch', 'shard')"),
        (lambda x: jnp.mean(x, axis="shard"), NameError, "for 'shard' write ('shard',): jax reads a string as its"),
    ],
)  # fmt: skip
def test_error_of_the_body_ends_in_its_line_and_lists_names(body, error, words):
    inner = xmap(body, ["shard", ...], ["shard", ...])
    with pytest.raises(error) as raised:
        xmap(lambda x: inner(x), ["batch", ...], ["batch", ...])(np.ones((2, 4, 3), np.float32))
    assert words in str(raised.value)
    assert last_line(raised.value).startswith("(lambda x:")
    assert str(raised.value).count("in scope") <= 1


def test_the_traceback_is_whole_where_jax_filters_nothing():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(TypeError) as raised:
            xmap(lambda x: x + jnp.ones(5), ["i", ...], ["i", ...])(ROWS)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert "lambda" not in last_line(raised.value)


@pytest.mark.parametrize("mesh_axis", [None, "x"])
def test_missing_gradient_is_no_matter_of_the_mesh(mesh_axis):
    """A gradient of pmax does not exist with any mesh, so the error does not advise another one."""
    gradient = xmap(jax.grad(lambda x: lax.pmax(x, "i")), ["i"], ["i"], axis_resources={"i": mesh_axis or ()})
    with (
        mesh(devices(2), ("x",)),
        pytest.raises(NotImplementedError, match="Differentiation rule for 'pmax' not") as raised,
    ):
        gradient(jnp.arange(2.0))
    assert "mesh" not in str(raised.value)


def test_spec_of_a_taken_mesh_axis_is_named():
    def constrain(x):
        return with_sharding_constraint(x, PartitionSpec("dp"))

    bodies = [constrain, pjit(double, PartitionSpec("dp"), None), pjit(double, None, PartitionSpec("dp"))]
    with mesh(devices(4, 2), ("dp", "mp")):
        for body in bodies:
            placed = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": "dp"})
            with pytest.raises(
                jax.errors.JAXTypeError, match=r"mesh axis 'dp', which axis_resources gives to 'i'; leave"
            ):
                placed(np.ones((4, 4), np.float32))
            free = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": "mp"})
            assert free(np.ones((4, 4), np.float32)).shape == (4, 4)
        with pytest.raises(ValueError, match="twice"):  # is not about the xmap
            xmap(pjit(double, PartitionSpec("mp", "mp"), None), ["i", ...], ["i", ...], axis_resources={"i": "dp"})(
                ROWS
            )
