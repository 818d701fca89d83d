"""`jax.util`: the helpers of jax's code that others used."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

partial = functools.partial
prod = math.prod


def safe_zip(*args: Iterable) -> list[tuple]:
    """Zips lists of one length."""
    columns = [list(arg) for arg in args]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(f"safe_zip takes lists of one length; got the lengths {lengths}")
    return list(zip(*columns, strict=True))


def safe_map(f: Callable, *args: Iterable) -> list:
    """Maps a function over lists of one length."""
    return [f(*row) for row in safe_zip(*args)]


def unzip2(pairs: Iterable[tuple]) -> tuple[tuple, tuple]:
    """Splits pairs into two tuples, which may be empty."""
    rows = list(pairs)
    return tuple(x for x, _ in rows), tuple(y for _, y in rows)


def unzip3(triples: Iterable[tuple]) -> tuple[tuple, tuple, tuple]:
    """Splits triples into three tuples, which may be empty."""
    rows = list(triples)
    return tuple(x for x, _, _ in rows), tuple(y for _, y, _ in rows), tuple(z for _, _, z in rows)


def subvals(lst: Iterable, replace: Iterable[tuple[int, Any]]) -> tuple:
    """Returns the values, with those at some indices replaced."""
    values = list(lst)
    for index, value in replace:
        values[index] = value
    return tuple(values)


def split_list(args: Sequence, ns: Sequence[int]) -> list[list]:
    """Splits a list into parts of the lengths `ns`, and the rest."""
    rest, parts = list(args), []
    for n in ns:
        parts.append(rest[:n])
        rest = rest[n:]
    return [*parts, rest]


def split_dict(dct: Mapping, names: Sequence) -> list:
    """Returns the values of a dict in the order of `names`, which must be all of its keys."""
    left = dict(dct)
    values = [left.pop(name) for name in names]
    if left:
        raise ValueError(f"split_dict takes all names of the dict; {', '.join(map(repr, left))} are missing")
    return values


def concatenate(xs: Iterable[Sequence]) -> list:
    """Joins lists."""
    return list(itertools.chain.from_iterable(xs))


def curry(f: Callable) -> Callable:
    """Returns a function whose call binds arguments of `f`."""
    return functools.partial(functools.partial, f)


def cache(max_size: int | None = 4096) -> Callable:
    """Returns a decorator that keeps results by their arguments."""
    return functools.lru_cache(maxsize=max_size)


def memoize(f: Callable) -> Callable:
    """Keeps all results of a function by its arguments."""
    return functools.cache(f)


def wraps(wrapped: Callable, **_) -> Callable:
    """Returns `functools.wraps(wrapped)`; a name and a docstring in the old templates are not filled in."""
    return functools.wraps(wrapped)


def ceil_of_ratio(x: int, y: int) -> int:
    """Returns x / y, rounded up."""
    return -(-x // y)


def tuple_insert(t: tuple, idx: int, val) -> tuple:
    """Returns the tuple with a value inserted before the index."""
    return (*t[:idx], val, *t[idx:])


def tuple_delete(t: tuple, idx: int) -> tuple:
    """Returns the tuple without the value at the index."""
    return (*t[:idx], *t[idx + 1 :])


def canonicalize_axis(axis: int, num_dims: int) -> int:
    """Returns the axis counted from the front; a ValueError if the array has no such axis."""
    if not -num_dims <= axis < num_dims:
        raise ValueError(f"axis {axis} is out of bounds for an array of {num_dims} dimensions")
    return axis % num_dims


def extend_name_stack(stack: str, name: str = "") -> str:
    """Returns the name stack with one more name."""
    return f"{stack}{name}/"


def wrap_name(name: str, transform_name: str) -> str:
    """Returns the name that a transformation gives a function."""
    return f"{transform_name}({name})"
