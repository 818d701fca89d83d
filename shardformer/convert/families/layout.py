"""The parts that a family's list of arrays is made of: one list for both ways.

Our matrices are [inputs, outputs] and stacked over layers; a head's columns are neighbours, and so are rotary pairs.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardformer.config import Config

View = Callable[[np.ndarray], np.ndarray]
Pairs = Callable[..., tuple["Part", ...]]  # `half_split` or `neighbours`


class Part(NamedTuple):
    """A slice of a stored array and the array of ours with the same values."""

    ours: str
    view: View = lambda ours: ours  # shows our array with the axes of the slice
    cut: tuple = ()  # index into the stored array of shape `Stored.seen`; only a number may index its first axis


class Stored(NamedTuple):
    """One array of a Hugging Face folder."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    layer: int | None = None
    row: int | None = None  # of our array that is stacked over the layers which have it
    seen: tuple[int, ...] = ()  # the shape that the parts index; () means the array's shape
    first: int = 0  # rows before the first that the model reads; zeros are written there


def _turn(ours: np.ndarray) -> np.ndarray:
    return ours.T


def linear(name: str, ours: str, outputs: int, inputs: int) -> Stored:
    """A matrix of torch.nn.Linear, which stores [outputs, inputs]."""
    return Stored(f"{name}.weight", (outputs, inputs), (Part(ours, _turn),))


def plain(name: str, ours: str, *shape: int) -> Stored:
    return Stored(name, shape, (Part(ours),))


def norm(name: str, ours: str, c: Config) -> list[Stored]:
    arrays = [plain(f"{name}.weight", f"{ours}/scale", c.model.d_model)]
    return arrays + ([plain(f"{name}.bias", f"{ours}/offset", c.model.d_model)] if "norm" in c.model.biased else [])


def table(name: str, c: Config) -> Stored:
    """The token table, without the rows that pad the vocabulary."""
    shape = c.model.vocab, c.model.table_size
    return Stored(name, shape, (Part("embed/tokens", lambda ours: ours[: c.model.vocab]),))


def head(name: str, c: Config) -> list[Stored]:
    if c.model.tied:
        return []
    arrays = [
        Stored(
            f"{name}.weight",
            (c.model.vocab, c.model.table_size),
            (Part("head/w", lambda ours: ours[:, : c.model.vocab].T),),
        )
    ]
    if "head" in c.model.biased and c.model.head_bias:
        arrays.append(
            Stored(f"{name}.bias", (c.model.vocab,), (Part("head/bias", lambda ours: ours[: c.model.vocab]),))
        )
    return arrays


def replace_head(arrays: list[Stored], c: Config) -> list[Stored]:
    """Returns arrays with the head of a model of rewards in place of the vocabulary's."""
    rest = [stored for stored in arrays if stored.parts[0].ours not in ("head/w", "head/bias")]
    return [*rest, linear("score", "score/w", 1, c.model.d_model)]


def rename(arrays: list[Stored], names: dict[str, str]) -> list[Stored]:
    """Returns arrays under the names of another library: `names` has patterns, and what replaces each of them."""
    result = []
    for stored in arrays:
        name = stored.name
        for pattern, theirs in names.items():
            name = re.sub(pattern, theirs, name)
        result.append(stored._replace(name=name))
    return result


def half_split(ours: str, c: Config, heads: int, cut: tuple = ()) -> tuple[Part, ...]:
    """Lists the parts of a projection to heads with rotary pairs (j, j + R/2); our pairs are (2j, 2j + 1)."""
    K, R = c.model.head_size, c.model.rotary_size if c.model.positions == "rotary" else 0
    places = [(slice(0, R // 2), slice(0, R, 2)), (slice(R // 2, R), slice(1, R, 2)), (slice(R, K), slice(R, K))]

    return tuple(
        Part(ours, functools.partial(show_by_head, heads, columns), (slice(None), *cut, theirs))
        for theirs, columns in places
        if len(range(K)[columns])
    )


def neighbours(ours: str, c: Config, heads: int, cut: tuple = ()) -> tuple[Part, ...]:
    """Lists the part of a projection to heads whose rotary pairs are (2j, 2j + 1), as ours."""
    return (Part(ours, functools.partial(show_by_head, heads, slice(None)), (slice(None), *cut)),)


def show_by_head(heads: int, columns: slice, ours: np.ndarray) -> np.ndarray:
    """Returns some columns of each head, [heads, columns, inputs]; of a bias, [heads, columns]."""
    by_head = ours.reshape(*ours.shape[:-1], heads, -1)[..., columns]
    return by_head.transpose(1, 2, 0) if by_head.ndim == 3 else by_head  # a bias has no inputs
