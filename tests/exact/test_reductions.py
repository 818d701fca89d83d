"""Sorting, sums, extremes and running sums are XLA's, and so are those of windows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer.exact import reductions
from tests.exact.comparison import (
    Comparison,
    bits,
    booleans,
    case,
    distinct,
    find_unnoticed,
    floats,
    integers,
    rules_of,
    shuffled,
)

NAN, INF = float("nan"), float("inf")
SPECIAL = shuffled(NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1.0, NAN, 2.5)
TIES = integers(3, 12, low=-2, high=2)
KINDS = {
    "floats": floats(3, 12),
    "whole floats": integers(3, 12, low=-2, high=2, dtype=np.float64),
    "ties": TIES,
    "int8": bits(3, 12, dtype=np.int8),
    "uint16": bits(3, 12, dtype=np.uint16),
    "int4": integers(3, 12, low=-8, high=7, dtype=jnp.int4),
}


def list_cases():
    return list_sorts() | list_reductions() | list_running() | list_windows()


def list_sorts():
    cases = {}
    for kind, draw in KINDS.items():
        cases[f"sort {kind}"] = case(lambda x: [lax.sort(x, dimension=axis) for axis in (0, 1)], draw)
        cases[f"argsort {kind}"] = case(lambda x: [jnp.argsort(x, axis=axis) for axis in (0, 1)], draw)
        if kind != "int4":
            cases[f"top_k {kind}"] = case(lambda x: lax.top_k(x, 5), draw)
        for find in lax.argmax, lax.argmin:
            cases[f"{find.__name__} {kind}"] = case(
                lambda x, find=find: [find(x, 0, np.int32), find(x, 1, np.int16)], draw
            )
    for name, function in {
        "sort": lax.sort, "argsort": jnp.argsort, "top_k": lambda x: lax.top_k(x, 7), "argmax": jnp.argmax,
        "argmin": jnp.argmin,
    }.items():  # fmt: skip
        cases[f"{name} of special numbers"] = case(function, SPECIAL)
    key, other = integers(3, 12, low=0, high=2), shuffled(NAN, 1, NAN, 0, -0.0, 0, -INF, 1, 0, 1, NAN, 2)
    cases["sort of pairs"] = case(lambda *arrays: lax.sort(arrays, num_keys=1), key, distinct(3, 12))
    cases["sort by two keys"] = case(
        lambda *arrays: lax.sort(arrays, num_keys=2, dimension=0), integers(12, low=0, high=2), other, distinct(12)
    )
    cases["sort by three keys"] = case(
        lambda *arrays: lax.sort(arrays, num_keys=3), key, booleans(3, 12), integers(3, 12, low=0, high=1)
    )
    cases["sort of booleans"] = case(lax.sort, booleans(9))
    cases["sort of falling"] = case(lambda x: jnp.sort(x, descending=True), SPECIAL)
    cases["lexsort"] = case(lambda x, y: jnp.lexsort((x, y)), other, integers(12, low=0, high=2))
    cases["searchsorted"] = case(lambda x, y: jnp.searchsorted(jnp.sort(x), y), SPECIAL, SPECIAL)
    cases["unique"] = case(lambda x: jnp.unique(x, size=7, return_counts=True), integers(12, low=0, high=5))
    cases["median"] = case(lambda x: [jnp.median(x, axis=1), jnp.quantile(x, 0.3, axis=0)], floats(3, 7))
    return cases


def list_reductions():
    cases = {}
    axes = (0,), (1,), (0, 2), (0, 1, 2), ()
    for name in "sum", "prod", "max", "min":
        for kind, draw in {
            "floats": floats(3, 4, 2), "integers": bits(3, 4, 2), "int8": bits(3, 4, 2, dtype=np.int8),
            "uint32": bits(3, 4, 2, dtype=np.uint32),
        }.items():  # fmt: skip
            function = getattr(lax, f"reduce_{name}")
            some = axes if kind == "floats" else axes[1:4:2]
            cases[f"reduce_{name} {kind}"] = case(lambda x, f=function, some=some: [f(x, each) for each in some], draw)
    for name in "and", "or", "xor":
        function = getattr(lax, f"reduce_{name}")
        for kind, draw in {"bits": bits(3, 4, 2), "booleans": booleans(3, 4, 2)}.items():
            cases[f"reduce_{name} {kind}"] = case(lambda x, f=function: [f(x, each) for each in axes[:-1]], draw)
    cases["extremes of special numbers"] = case(lambda x: [jnp.max(x), jnp.min(x), jnp.sum(x)], SPECIAL)
    cases["extremes of nothing"] = case(lambda x: [jnp.sum(x, 0), jnp.prod(x, 0), jnp.max(x, 1)], floats(0, 3))
    cases["logsumexp"] = case(lambda x: jax.nn.logsumexp(x, axis=(0, 2)), floats(3, 4, 2))
    cases["gradient of max"] = case(jax.grad(lambda x: (x.max(1) ** 2).sum()), integers(3, 4, dtype=np.float64))
    return cases


def list_running():
    cases = {}
    for name, reverse in itertools.product(("sum", "prod", "max", "min", "logsumexp"), (False, True)):
        function = getattr(lax, f"cum{name}")
        for kind in ("floats", "int8", "ties") if name != "logsumexp" else ("floats",):
            cases[f"cum{name} {kind} {reverse}"] = case(
                lambda x, f=function, reverse=reverse, axes=(0, 1) if kind == "floats" else (1,): [
                    f(x, axis, reverse) for axis in axes
                ],
                KINDS[kind],
            )
        if name in ("max", "min"):
            cases[f"cum{name} of special numbers {reverse}"] = case(
                functools.partial(function, reverse=reverse), SPECIAL
            )
    cases["gradient of cumsum"] = case(jax.grad(lambda x: jnp.sin(lax.cumsum(x, 1)).sum()), floats(3, 4))
    cases["gradient of cumprod"] = case(jax.grad(lambda x: jnp.sin(lax.cumprod(x, 1)).sum()), floats(3, 4))
    cases["gradient of cumlogsumexp"] = case(jax.grad(lambda x: jnp.sin(lax.cumlogsumexp(x, 1)).sum()), floats(3, 4))
    return cases


WINDOWS = {  # window, strides, padding, base dilation, window dilation
    "plain": ((1, 2, 3, 1), (1, 2, 2, 1), "VALID", None, None),
    "same": ((1, 3, 2, 1), (1, 2, 1, 1), "SAME", None, None),
    "dilated": ((1, 2, 2, 2), (1, 1, 2, 1), [(0, 0), (2, 1), (0, 3), (0, 0)], (1, 2, 1, 3), (1, 1, 3, 1)),
}  # fmt: skip


def _pool(function, options, x):
    reduce, first = function
    return lax.reduce_window(x, np.array(first, x.dtype), reduce, **options)


def list_windows():
    cases = {}
    for (name, options), (kind, function) in itertools.product(
        WINDOWS.items(), {"sum": (lax.add, 0), "max": (lax.max, -INF), "min": (lax.min, INF)}.items()
    ):
        names = "window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation"
        given = dict(zip(names, options, strict=True))
        pool = functools.partial(_pool, function, given)
        cases[f"{kind} of windows {name}"] = case(pool, floats(2, 6, 7, 2))
        if kind == "sum" or name != "dilated":  # JAX has no gradient of these
            gradient = jax.grad(lambda x, pool=pool: jnp.sin(pool(x)).sum())
            cases[f"gradient of {kind} of windows {name}"] = case(gradient, integers(2, 6, 7, 2, dtype=np.float64))
    plain = functools.partial(lax.reduce_window, window_dimensions=(2, 2), window_strides=(2, 2), padding="SAME")
    cases["sum of windows of integers"] = case(lambda x: plain(x, np.int8(0), lax.add), bits(5, 5, dtype=np.int8))
    least = np.iinfo(np.int32).min
    cases["max of windows of integers"] = case(lambda x: plain(x, np.int32(least), lax.max), bits(5, 5))
    cases["vmapped windows"] = case(jax.vmap(lambda x: plain(x, -np.inf, lax.max)), floats(3, 5, 5))
    return cases


@pytest.fixture(scope="module")
def compared():
    return Comparison(list_cases())


@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_reductions_are_those_of_xla(compared, where):
    assert not list(compared.list_differences(where))


def test_each_wrong_rule_is_noticed(compared):
    assert not find_unnoticed(compared, rules_of(reductions))


def test_each_rule_has_a_case(compared):
    assert rules_of(reductions) <= compared.operations
