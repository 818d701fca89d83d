"""Operations that move elements are XLA's: shapes, slices, pads, gathers and scatters, within and out of bounds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer import exact
from shardformer.errors import UsageError
from shardformer.exact import movement
from tests.exact.comparison import Comparison, booleans, case, distinct, find_unnoticed, floats, integers, rules_of

MODES = "clip", "fill", "promise_in_bounds"


def list_cases():
    return list_shapes() | list_pads() | list_slices() | list_gathers() | list_scatters() | list_vmapped()


def list_shapes():
    x = distinct(2, 3, 4)
    return {
        "reshape": case(lambda x: [lax.reshape(x, shape) for shape in ((24,), (4, 6), (1, 2, 12, 1))], x),
        "reshape of transposed": case(lambda x: lax.reshape(x, (6, 4), (2, 0, 1)), x),
        "squeeze": case(lambda x: lax.squeeze(x, (1, -1)), distinct(2, 1, 3, 1)),
        "expand_dims": case(lambda x: lax.expand_dims(x, (0, 2)), distinct(2, 3)),
        "broadcast": case(
            lambda x: [lax.broadcast(x, (2, 1)), lax.broadcast_in_dim(x, (3, 2, 5, 4), (1, 3))], distinct(2, 4)
        ),
        "broadcast a scalar": case(lambda x: lax.broadcast(x, (2, 3)), floats()),
        "broadcast of size 1": case(lambda x: lax.broadcast_in_dim(x, (3, 4), (0, 1)), distinct(1, 4)),
        "transpose": case(lambda x: [lax.transpose(x, order) for order in itertools.permutations(range(3))], x),
        "rev": case(lambda x: [lax.rev(x, axes) for axes in ((0,), (1, 2), (2, 0))], x),
        "concatenate": case(lambda x, y: [lax.concatenate((x, y, x), 1)], x, distinct(2, 5, 4)),
        "concatenate integers": case(lambda x, y: lax.concatenate((x, y), 0), integers(3), integers(4)),
        "stack": case(lambda x, y: [jnp.stack((x, y), axis) for axis in (0, 1, 2)], distinct(2, 3), distinct(2, 3)),
        "split": case(lambda x: [lax.split(x, (1, 3), 2), lax.split(x, (1, 0, 2), 1)], x),
        "unstack": case(lambda x: [jnp.unstack(x, axis=axis) for axis in (0, 1, 2)], x),
        "tile": case(lambda x: [jnp.tile(x, (2, 1, 3)), jnp.tile(x, (2, 1, 1, 2))], x),
    }


def list_pads():
    configurations = [
        [(0, 0, 0), (1, 2, 0), (0, 0, 0)], [(2, 1, 1), (0, 0, 2), (3, 0, 3)], [(-1, 0, 0), (0, -1, 0), (-1, -2, 0)],
        [(-1, 2, 1), (2, -1, 2), (-3, -3, 1)], [(-2, 0, 0), (0, 0, 0), (0, 0, 0)], [(-2, 3, 0), (0, 0, 0), (0, 0, 0)],
        [(0, 0, 0), (-5, 6, 1), (5, -7, 0)], [(0, -1, 3), (-4, 1, 1), (-2, -6, 2)],
        [(3, -3, 0), (-1, -4, 1), (0, 0, 4)],
        [(-3, -2, 4), (-2, 0, 1), (1, -5, 1)],
    ]  # fmt: skip
    random = np.random.RandomState(0)
    while len(configurations) < 20:
        drawn = [tuple(map(int, (*random.randint(-6, 4, 2), random.randint(0, 4)))) for _ in range(3)]
        if all(
            low + high + (n - 1) * (step + 1) + 1 >= 0 for (low, high, step), n in zip(drawn, (2, 3, 4), strict=True)
        ):
            configurations.append(drawn)
    return {f"pad {each}": case(functools.partial(lax.pad, padding_config=each), distinct(2, 3, 4), floats())
            for each in configurations} | {
        "pad nothing": case(lambda x, value: lax.pad(x, value, [(2, 1, 3)]), floats(0), floats()),
    }  # fmt: skip


def list_slices():
    x, start = distinct(5, 6), integers(2, low=-4, high=8)
    return {
        "slice": case(lambda x: [lax.slice(x, (1, 0), (4, 6), (1, 4)), lax.slice(x, (0, 2), (5, 5))], x),
        "empty slice": case(lambda x: lax.slice(x, (2, 1), (2, 3)), x),
        "dynamic_slice": case(lambda x, at: lax.dynamic_slice(x, (at[0], at[1]), (2, 3)), x, start),
        "dynamic_slice at a constant": case(lambda x, at: lax.dynamic_slice(x, (np.int32(3), at[1]), (3, 3)), x, start),
        "dynamic_slice unsigned": case(
            lambda x, at: lax.dynamic_slice(x, (at, at), (2, 3)), x, integers(low=0, high=255, dtype=np.uint8)
        ),
        "dynamic_slice of a vector": case(lambda x, at: lax.dynamic_slice(x, (at[0],), (4,)), distinct(9), start),
        "dynamic_update_slice": case(
            lambda x, update, at: lax.dynamic_update_slice(x, update, (at[0], at[1])), x, floats(2, 3), start
        ),
        "dynamic_update_slice of integers": case(
            lambda x, update, at: lax.dynamic_update_slice(x, update, (at[0],)), integers(7), integers(3), start
        ),
        "dynamic_index": case(lambda x, at: lax.dynamic_index_in_dim(x, at, 1), x, integers(low=-9, high=9)),
    }


GATHERS = {  # GatherDimensionNumbers, slice sizes, shape of the operand and of the indices
    "rows": (((1,), (0,), (0,)), (1, 4), (5, 4), (3, 1)),
    "columns": (((0,), (1,), (1,)), (5, 1), (5, 4), (2, 3, 1)),
    "elements": (((), (0, 1), (0, 1)), (1, 1), (5, 4), (6, 2)),
    "swapped": (((), (0, 1), (1, 0)), (1, 1), (5, 4), (6, 2)),
    "windows": (((1, 2), (), (0, 1)), (2, 3), (5, 6), (4, 2)),
    "windows first": (((0, 2), (), (1, 0)), (3, 2), (5, 6), (4, 2)),
    "one window": (((0, 1), (), (1,)), (5, 2), (5, 6), (1,)),
    "batched": (
        ((1,), (1,), (1,), (0,),
             (0,)), (1, 1, 4), (3, 5, 4), (3, 1),
    ),
    "batched last": (
        ((2,), (0,), (0,), (2,),
             (1,)), (1, 2, 1), (5, 4, 3), (6, 3, 1),
    ),
}  # fmt: skip


def list_gathers():
    cases = {}
    for (name, (numbers, sizes, shape, indices)), mode in itertools.product(GATHERS.items(), MODES):
        low, high = (0, min(shape) - max(sizes) if "window" in name else 2) if "promise" in mode else (-7, 9)
        gather = functools.partial(
            lax.gather, dimension_numbers=lax.GatherDimensionNumbers(*numbers), slice_sizes=sizes, mode=mode
        )
        cases[f"gather {name} {mode}"] = case(gather, distinct(*shape), integers(*indices, low=low, high=max(high, 0)))
        if mode == "fill":
            for dtype in np.int8, np.uint16:
                cases[f"gather {name} {np.dtype(dtype)}"] = case(
                    gather, distinct(*shape, dtype=dtype), integers(*indices, low=-7, high=9)
                )
            given = functools.partial(gather, fill_value=7)
            cases[f"gather {name} filled"] = case(given, distinct(*shape), integers(*indices, low=-7, high=9))
            cases[f"gather {name} bool"] = case(gather, booleans(*shape), integers(*indices, low=-7, high=9))
    unsigned = integers(6, low=0, high=255, dtype=np.uint8)
    cases["take by bytes"] = case(lambda x, i: jnp.take(x, i, mode="fill"), distinct(9), unsigned)
    cases["take from the end"] = case(lambda x, i: x[i, 1:3], distinct(5, 4), integers(3, low=-5, high=4))
    cases["take_along_axis"] = case(
        lambda x, i: jnp.take_along_axis(x, i, axis=1), distinct(3, 5), integers(3, 2, low=-5, high=4)
    )
    return cases


SCATTERS = {  # ScatterDimensionNumbers, shape of the operand, of the indices and of the updates
    "rows": (((1,), (0,), (0,)),
             (5, 4), (7, 1), (7, 4)),
    "columns": (((0,), (1,), (1,)),
                (5, 4), (2, 3, 1), (5, 2, 3)),
    "elements": (((), (0, 1), (1, 0)),
                 (5, 4), (9, 2), (9,)),
    "windows": (((0, 2), (), (0, 1)),
                (5, 6), (4, 2), (2, 4, 3)),
    "one window": (((0, 1), (), (0,)),
                   (5, 6), (1,), (2, 3)),
    "batched": (
        ((2,), (1,), (1,),
             (0,), (0,)), (3, 5, 4), (3, 6, 1), (3, 6, 4),
    ),
    "a scalar": (((), (), ()), (), (0,), ()),
}  # fmt: skip
SCATTER = {
    "add": lax.scatter_add, "sub": lax.scatter_sub, "mul": lax.scatter_mul, "min": lax.scatter_min,
    "max": lax.scatter_max, "set": lax.scatter,
}  # fmt: skip


def list_scatters():
    cases = {}
    for (name, (numbers, shape, indices, updates)), mode, kind in itertools.product(SCATTERS.items(), MODES, SCATTER):
        if kind not in ("add", "set") and mode != "clip":
            continue
        scatter = functools.partial(SCATTER[kind], dimension_numbers=lax.ScatterDimensionNumbers(*numbers), mode=mode)
        # XLA leaves open which of two updates of one element is the last one.
        low, high = (0, 2) if "promise" in mode else (-7, 9)
        draw = integers(*indices, low=low, high=high)
        values = floats if kind != "set" else lambda *shape: lambda random: np.full(shape, random.uniform())
        cases[f"scatter {kind} {name} {mode}"] = case(scatter, floats(*shape), draw, values(*updates))
        if kind != "set" and mode == "clip":
            for dtype in (np.int8, np.uint32) if name == "rows" else (np.int8,):
                low = 0 if dtype == np.uint32 else -9
                cases[f"scatter {kind} {name} {mode} {np.dtype(dtype)}"] = case(
                    scatter, integers(*shape, low=low, dtype=dtype), draw, integers(*updates, low=low, dtype=dtype)
                )
    order = distinct(8, dtype=np.int32)
    cases["set in any order"] = case(lambda x, i, u: x.at[i].set(u, unique_indices=True), floats(8), order, floats(8))
    cases["set booleans"] = case(lambda x, i: x.at[i].set(True, mode="drop"), booleans(8), integers(3, low=0, high=9))
    cases["segment_sum"] = case(
        lambda x, i: jax.ops.segment_sum(x, i, num_segments=4), floats(9, 2), integers(9, low=0, high=5)
    )
    cases["gradient of take"] = case(
        jax.grad(lambda x, i, w: (jnp.take(x, i, axis=0, mode="clip") * w).sum()), floats(5, 3),
        integers(6, low=0, high=4), floats(6, 3),
    )  # fmt: skip
    return cases


def list_vmapped():
    x, at, update = floats(3, 5, 6), integers(3, 2, low=-3, high=8), floats(3, 2, 3)
    return {
        "vmapped dynamic_slice": case(
            jax.vmap(lambda x, at: lax.dynamic_slice(x, (at[0], at[1]), (2, 3))), x, at
        ),
        "vmapped dynamic_update_slice": case(
            jax.vmap(lambda x, u, at: lax.dynamic_update_slice(x, u, (at[0], at[1]))), x, update, at
        ),
        "vmapped take": case(jax.vmap(lambda x, i: jnp.take(x, i, axis=1, mode="fill")), x, integers(3, 4, low=-8)),
        "vmapped indices": case(
            jax.vmap(lambda x, i: x[i], in_axes=(None, 0)), floats(5, 6), integers(3, 4, low=-5, high=4)
        ),
        "vmapped add": case(
            jax.vmap(lambda x, i, u: x.at[i].add(u, mode="drop")), floats(3, 5), integers(3, 7, low=-7), floats(3, 7)
        ),
        "vmapped twice": case(
            jax.vmap(jax.vmap(lambda x, i: x[i], in_axes=(0, None)), in_axes=(1, 0)), floats(2, 3, 5),
            integers(3, 4, low=-5, high=4),
        ),
        "gradient of vmapped take": case(
            jax.grad(lambda x, i: jnp.sin(jax.vmap(lambda x, i: x[i])(x, i)).sum()), floats(3, 5),
            integers(3, 4, low=-5, high=4),
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def compared():
    return Comparison(list_cases())


@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_movements_are_those_of_xla(compared, where):
    assert not list(compared.list_differences(where))


def test_each_wrong_rule_is_noticed(compared):
    assert not find_unnoticed(compared, rules_of(movement))


def test_each_rule_has_a_case(compared):
    assert rules_of(movement) <= compared.operations


def test_function_of_elements_is_named():
    with pytest.raises(UsageError, match=r"cannot run scatter with a function of elements; tests/exact/test_movement"):
        exact.run(lambda x: x.at[1].apply(jnp.sin), np.ones(3))
