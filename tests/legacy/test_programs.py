"""Today's xmap against results of jax 0.4.13 and 0.4.30; shardformer/legacy/differences.toml lists each difference."""

import fnmatch
import functools
import json
import pathlib
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import legacy
from tests.legacy.programs import PROGRAMS
from tests.legacy.programs.collectives import GRIDS, LAYOUTS
from tests.legacy.programs.registry import floats, ints, mesh, on, rows
from tests.legacy.record_programs import outcome, read

VERSIONS = ("0.4.13", "0.4.30")
GOLDENS = {
    version: json.loads(pathlib.Path(__file__).with_name("goldens").joinpath(f"programs_{version}.json").read_text())
    for version in VERSIONS
}
TABLE = pathlib.Path(legacy.__file__).with_name("differences.toml")
# The patterns of programs of each row, and the outcomes under both versions and today.
ROWS = [
    (row["programs"], (row["jax_0_4_13"], row["jax_0_4_30"], row["today"]))
    for row in tomllib.loads(TABLE.read_text())["difference"]
]


def listed(name):
    return [outcomes for patterns, outcomes in ROWS if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def same(golden, found):
    """Integers and dtypes exactly, f32 to 1e-6; an error where there was one of that name, or of a class above it."""
    if "error" in golden or "error" in found:
        return golden.get("error", "") in found.get("kinds", [])
    pairs = list(zip(golden["leaves"], found["leaves"], strict=False))
    alike = golden["tree"] == found["tree"] and all(g["dtype"] == f["dtype"] for g, f in pairs)
    return alike and all(close(read(g), read(f)) for g, f in pairs)


def close(expected, got):
    if expected.shape != got.shape or expected.dtype.kind not in "fc":
        return np.array_equal(expected, got)
    return np.allclose(got, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max(initial=0), equal_nan=True)


def cell(golden, found):
    """Returns the table's word for the outcome of one version: its error, "value" or "other value"."""
    if "error" in golden:
        return golden["error"]
    return "value" if "error" in found or same(golden, found) else "other value"


@pytest.fixture(scope="module", autouse=True)
def legacy_jax():
    with legacy.installed(legacy_random=True):
        yield


@functools.cache
def outcome_today(name):
    """Each program runs once, for both of the tests that look at it."""
    return outcome(PROGRAMS[name])


# The custom_vjp that JAX plans traces its rules where the axis is bound, so these have the values of 0.4.13.
RIGHT_WITH_CUSTOM_VJP3 = {"outside_custom_vjp_with_pmean", "outside_jitted_custom_vjp_with_psum"}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:a result of the xmapped")
def test_program(name):
    found = outcome_today(name)
    goldens = [GOLDENS[version][name] for version in VERSIONS]
    if name in RIGHT_WITH_CUSTOM_VJP3 and getattr(jax.config, "jax_custom_vjp3", False):
        assert same(goldens[0], found)
        return
    cells = tuple(cell(outcome, found) for outcome in (*goldens, found))
    if all(same(golden, found) for golden in goldens):
        assert not listed(name), f"{TABLE.name} lists {name}, which is as it always was: {cells}"
    else:
        assert listed(name) == [cells], f"{TABLE.name} lacks a row for {name}; today: {found}; before: {goldens}"


def test_every_program_was_recorded_and_every_row_is_one():
    assert len(PROGRAMS) >= 650
    assert all(set(golden) == set(PROGRAMS) for golden in GOLDENS.values())
    for patterns, _ in ROWS:
        assert all(fnmatch.filter(PROGRAMS, pattern) for pattern in patterns), patterns


# Dense references: what a program means, said with whole arrays and without names ------------------------------------


def to_all(total):
    """Returns the value of every instance after a collective that gives all of them the same."""
    return lambda x: np.broadcast_to(result := total(x), (len(x), *np.shape(result)))


def grouped(reduce):
    """Returns the value of every instance after reducing over the even or the odd instances."""
    return lambda x: np.stack([reduce(x[k % 2 :: 2]) for k in range(len(x))])


def moved(x, pairs):
    """The rows sent along the pairs (from, to); zeros where nothing arrives."""
    sources, targets = np.array(pairs).T
    return jnp.zeros_like(x).at[targets].set(x[sources])


def numbered(x):
    return np.arange(1, len(x) + 1, dtype=np.float32)


COLLECTIVES = {
    "psum": to_all(lambda x: x[:, :2].sum(0)),
    "psum_groups": grouped(lambda x: x[:, :2].sum(0)),
    "pmax_groups": lambda x: np.repeat(x[:, :2].reshape(2, -1, 2).max(1), len(x) // 2, axis=0),
    "all_gather": to_all(lambda x: x[:, :2]),
    "all_gather_axis_1": to_all(lambda x: x[:, :2].T),
    "all_gather_concatenated": to_all(lambda x: x[:, :2].ravel()),
    "all_gather_groups": grouped(lambda x: x[:, :2]),
    "psum_scatter": lambda x: x.sum(0),
    "psum_scatter_concatenated": lambda x: x.sum(0)[:, None],
    "psum_scatter_axis_1": lambda x: (x.sum(0)[:, None] * np.array([1, 2]))[:, :, None],
    "psum_scatter_groups": lambda x: np.stack([x[k % 2 :: 2, k // 2].sum() for k in range(len(x))]),
    "all_to_all": lambda x: x.T,
    "all_to_all_shared": lambda x: np.repeat(x.sum(0)[:, None], len(x), axis=1),
    "pswapaxes_shared": lambda x: np.repeat((x.sum(0)[:, None] * np.array([1, 2]))[:, :, None], len(x), axis=2),
    "pmax_of_negatives": to_all(lambda x: (-1 - x[:, :2].astype(np.float32)).max(0)),
    "ppermute": lambda x: np.roll(x[:, :2], 1, axis=0),
    "ppermute_partial": lambda x: moved(x[:, :2] + 1, [(0, 5), (5, 1)]),
    "pshuffle": lambda x: x[::-1, :2],
}
PAIRS = {
    "pair_all_gather": lambda x: np.broadcast_to(x[..., :1].reshape(-1, 1), (*x.shape, 1)),
    "pair_all_gather_reversed": lambda x: np.broadcast_to(x[..., :1].transpose(1, 0, 2).reshape(-1, 1), (*x.shape, 1)),
    "pair_psum_scatter": lambda x: x.sum((0, 1)).reshape(x.shape[:2]),
    "pair_ppermute": lambda x: np.roll(x[..., :1].ravel(), 1).reshape(*x.shape[:2], 1),
}
# The sum of all instances' losses: the gradient inside the body is its gradient.
LOSSES = {
    "grad_psum": lambda x: jnp.sum(x.sum(0, keepdims=True) * x * numbered(x)[:, None]),
    "grad_all_gather": lambda x: jnp.sum(x) * jnp.sum(numbered(x)),
    "grad_all_gather_concatenated": lambda x: jnp.sum((x * x).ravel()[2:9]) * jnp.sum(numbered(x)),
    "grad_ppermute": lambda x: jnp.sum((x * moved(x, [(0, 1), (1, 2), (2, 5), (5, 0)])).sum(1) * numbered(x)),
    "grad_all_to_all_alone": jnp.sum,
    "grad_psum_scatter": lambda x: jnp.sum((x * x).sum(0) * numbered(x)),
    "grad_psum_scatter_concatenated": lambda x: jnp.sum((x * x).sum(0) * numbered(x)),
}
SQUARE = ("grad_all_to_all_alone", "grad_psum_scatter", "grad_psum_scatter_concatenated")
# What all instances together return; its sum, weighted by instance, is differentiated from outside.
OUTSIDE = {
    "outside_psum": lambda x: jnp.broadcast_to((x * x).sum(0), x.shape),
    "outside_pmean": lambda x: jnp.broadcast_to((x * x).mean(0), x.shape),
    "outside_all_gather": lambda x: jnp.broadcast_to(x * x, (len(x), *x.shape)),
    "outside_ppermute": lambda x: moved(x * x, [(0, 1), (1, 2), (2, 5)]),
    "outside_remat": lambda x: (x * x * numbered(x)[:, None] / 8).sum(0, keepdims=True) * x,
    "outside_reduced": lambda x: (x * x).sum(0, keepdims=True),
}


def weighted(body):
    def loss(x):
        each = body(x)
        return jnp.sum(each.reshape((len(each), -1)).sum(1) * numbered(each) / 4)

    return loss


def over(layouts, make, dense):
    """References of programs that take `make(size)` under every layout."""
    return {
        f"{name}_{layout}": functools.partial(lambda function, size: function(make(size)), function, size)
        for name, function in dense.items()
        for layout, (size, *_) in layouts.items()
    }


def added(x):
    return x.sum(0, keepdims=True) + x


def donated(*gone):
    """Returns the results of the donation programs; `gone` lists which of the three arrays were deleted."""
    state, batch = (floats(4, 3), floats(4, 2)), floats(4, 3) + 1
    return state[0] + batch, state[1] * 2, to_all(lambda x: x.sum(0))(batch), *map(np.bool_, gone)


def two_steps_down(x):
    for _ in range(2):
        x = x - np.cos(x) / 8
    return x


def crossed_by_hand(n, m):
    """Returns the result of `resources.crossed` for axes of n and m."""
    x, y = ints(n, 3)[:, None], ints(3, m).T[None]
    largest = np.broadcast_to((x + y).max((0, 1)), (n, m, 3))
    i, j = np.indices((n, m))
    return np.broadcast_to((x * y).sum(0), (n, m, 3)), largest, i, j


SPREAD = {
    "psum_groups": COLLECTIVES["psum_groups"],
    "pmax_groups": COLLECTIVES["pmax_groups"],
    "all_gather_groups": COLLECTIVES["all_gather_groups"],
    "psum_scatter_groups": COLLECTIVES["psum_scatter_groups"],
    "ppermute_partial": lambda x: moved(x[:, :2] + 1, [(0, 3), (3, 1)]),
}


REFERENCES = {
    **{f"{name}_spread": functools.partial(dense, ints(4, 4)) for name, dense in SPREAD.items()},
    **over(LAYOUTS, lambda size: ints(size, size), COLLECTIVES),
    **over(GRIDS, lambda sizes: ints(*sizes, np.prod(sizes)), PAIRS),
    **over(
        LAYOUTS,
        lambda size: floats(size, 3),
        {name: jax.grad(loss) for name, loss in LOSSES.items() if name not in SQUARE},
    ),
    **over(
        LAYOUTS,
        lambda size: floats(size, size),
        {name: jax.grad(loss) for name, loss in LOSSES.items() if name in SQUARE},
    ),
    **over(
        LAYOUTS,
        lambda size: floats(size, 3),
        {name: jax.grad(weighted(body)) for name, body in OUTSIDE.items()},
    ),
    "outside_psum_56": lambda: 8 * np.arange(8, dtype=np.float32),
    "pshuffle_over_a_reversed_mesh": lambda: ints(4, 2)[[3, 0, 2, 1]],
    "groups_beside_a_tiled_axis": lambda: (
        (np.repeat(ints(4, 4).reshape(2, 2, 4).sum(1), 2, axis=0) + ints(4, 4).sum(1, keepdims=True)).T
    ),
    "spec_size_zero": lambda: ints(0, 3),
    "out_list_for_tuple": lambda: (ints(2, 3)[:, :1], ints(2, 3)[:, 1:].T),
    "out_tuple_for_list": lambda: (ints(2, 3)[:, :1], ints(2, 3)[:, 1:].T),
    "out_omitted_vmapped": lambda: 2 * ints(4, 3)[0],
    "out_omitted_on_mesh": lambda: 2 * (ints(4, 3) + 1)[0],
    "out_omitted_tiled": lambda: 2 * (ints(8, 3) + 1)[0],
    "out_omitted_of_two": lambda: ints(2) + 5,
    "mesh_assigned_with_one_argument": lambda: {"x": np.int32(4), "y": np.int32(2)},
    "mesh_from_maps": lambda: to_all(lambda x: x.sum(0))(ints(8, 3)),
    "mesh_class_from_maps": lambda: to_all(lambda x: x.sum(0))(ints(8, 3)),
    "elsewhere_chain_forward": lambda: np.sin(floats(8, 3)) ** 2,
    "elsewhere_other_axis_forward": lambda: np.sin(floats(8, 3)),
    "elsewhere_step_by_step": lambda: two_steps_down(floats(8, 3)),
    "pgather_named_on_mesh": lambda: ints(4, 3, 2)[ints(5) % 3],
    "xeinsum_other_order": lambda: (floats(3, 4) @ floats(4, 5)).T,
    "option_omnistaging": lambda: np.bool_(True),
    "sharded_array_by_spec": lambda: ints(4, 3),
    "mesh_of_pxla": lambda: to_all(lambda x: x.sum(0))(ints(8, 3)),
    "global_device_array": lambda: (ints(8, 2), ints(8, 2)[:2, 1:], np.int32(8)),
    "resource_unknown_axis": lambda: crossed_by_hand(4, 2),
    "transform_jit_vmapped": lambda: added(ints(4, 3)),
    "transform_jit_mesh": lambda: added(ints(4, 3)),
    "transform_jit_tiled": lambda: added(ints(16, 3)),
    "transform_jit_unused_axis": lambda: added(ints(4, 3)),
    "transform_jit_part_of_jit": lambda: added(ints(8, 3) + 1) * 2,
    "transform_jit_index": lambda: ints(16),
    "transform_jit_grad": lambda: floats(8, 3) - 3 * floats(8, 3) ** 2 / 8,
    "nested_same_name": lambda: np.broadcast_to(ints(4, 2, 3).sum(1, keepdims=True), (4, 2, 3)),
    "loop_of_two_axes": lambda: ints(4)[:, None] * 10 + ints(1, 6),
    "loop_shared_by_two_axes": lambda: ints(4)[:, None] * 10 + ints(1, 6),
    "donate_negative": lambda: donated(False, False, True),
}


def computes(name):
    """Returns True if the program gives a value today."""
    outcomes = listed(name)
    return outcomes[0][-1] == "value" if outcomes else "error" not in GOLDENS[VERSIONS[-1]][name]


NEW = [name for name in PROGRAMS if computes(name) and listed(name) and "value" not in listed(name)[0][:-1]]


@pytest.mark.parametrize("name", sorted({*filter(computes, REFERENCES), *NEW}))
@pytest.mark.filterwarnings("ignore:a result of the xmapped")
def test_dense(name):
    expected, found = jax.tree.leaves(REFERENCES[name]()), outcome_today(name)
    assert len(expected) == len(found["leaves"])
    for reference, leaf in zip(expected, found["leaves"], strict=True):
        assert close(np.asarray(reference), read(leaf)), (reference, leaf)


def test_a_collective_that_only_some_devices_reach():
    """Legacy xmap waited forever here, on a mesh as large as the axis; resources never change a value."""

    def body(x):
        is_even = jax.lax.axis_index("i") % 2 == 0
        return jax.lax.cond(is_even, lambda x: jax.lax.psum(x, "i"), lambda x: -x, x)

    with mesh(x=8):
        got = rows(body, ints(8, 3), axis_resources={"i": "x"})
    assert np.array_equal(got[::2], to_all(lambda x: x.sum(0))(ints(8, 3))[::2])
    assert np.array_equal(got[1::2], -ints(8, 3)[1::2])


def test_an_exchange_that_moves_an_axis_has_a_gradient():
    """No jax release could transpose this exchange under vmap."""
    got = rows(
        jax.grad(lambda x: jnp.sum(jax.lax.all_to_all(jnp.stack([x, x * x], 1), "i", 0, 1)[1] ** 2)), floats(4, 4)
    )
    np.testing.assert_allclose(got, 4 * floats(4, 4) ** 3, rtol=1e-6)


def test_an_error_of_the_body_is_its_own():
    calls = []

    def body(x):
        calls.append(x)
        if len(calls) == 1:
            raise ValueError("the body's own")
        return x

    with pytest.raises(ValueError, match="the body's own"):
        rows(body, ints(4, 3))


# The strict reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"x": 4}, {"x": 2}], ids=["vmapped", "mesh", "tiled"])
def test_lenient_says_so_and_strict_raises(sizes):
    def call():
        return rows(lambda x: x + 1, ints(4, 3), out=[...], axis_resources={"i": "x"} if sizes else {})

    with on(sizes):
        with pytest.warns(UserWarning, match="out_axes"):
            call()
        with legacy.installed(strict=True), pytest.raises(TypeError, match="out_axes"):
            call()


def test_strict_refuses_a_list_for_a_tuple():
    with legacy.installed(strict=True), pytest.raises(ValueError, match="out_axes"):
        PROGRAMS["out_list_for_tuple"]()
