"""in_axes and out_axes: for every array, which of its positions carry which named axes."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class AxisSpec:
    """One array's spec. `positions` maps a name to its position; `rank` is asserted unless the spec ends in `...`."""

    positions: tuple[tuple[Hashable, int], ...]
    rank: int | None
    text: str

    def position(self, name, removed=()):
        """Returns the position of `name` after the axes `removed` left the array; None if the spec omits it."""
        placed = dict(self.positions)
        if name not in placed:
            return None
        return placed[name] - sum(placed.get(other, placed[name]) < placed[name] for other in removed)

    @property
    def names(self) -> tuple:
        return tuple(name for name, _ in self.positions)

    def check(self, shape: tuple, what: str):
        """Rejects an array whose unsharded shape does not fit these axes."""
        if self.rank is not None and self.rank != len(shape):
            raise ValueError(
                f"{what} has the spec {self.text}, which asserts rank {self.rank}, but its shape is {shape} "
                f"(rank {len(shape)}); end the spec in ... to allow more positions"
            )
        for name, position in self.positions:
            if position >= len(shape):
                raise ValueError(
                    f"{what} has the spec {self.text}, which has {name!r} at position {position}, but its shape "
                    f"is {shape} (rank {len(shape)}); move the axis, or use [...] for an array that is not mapped"
                )


class SpecTree:
    """A pytree prefix of specs, to be matched against arguments or results by path."""

    def __init__(self, specs, what: str):
        self.what, self.specs = what, specs
        no_arguments = isinstance(specs, tuple) and not specs  # whereas [] asserts rank 0
        result = [] if no_arguments else jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
        self.entries: dict[tuple, AxisSpec] = {
            path: parse_spec(entry, f"{what}{_keys(path)}") for path, entry in result
        }
        self.distinct: tuple[AxisSpec, ...] = tuple(dict.fromkeys(self.entries.values()))

    @property
    def key(self) -> tuple:
        """The hashable identity of the specs, with their containers, which strict=True distinguishes."""
        return jax.tree.structure(self.specs, is_leaf=is_spec), tuple(self.entries.items())

    @property
    def names(self) -> list:
        return list(dict.fromkeys(name for axes in self.distinct for name in axes.names))

    def match(self, tree: Any, strict: bool = False) -> list[tuple[str, AxisSpec]]:
        """Returns the path and the spec of every leaf of `tree`, in the order of its leaves.

        Lists and tuples match each other, because the oldest code wrote `out_axes=[a, b]` for a tuple of results.
        strict=True requires the containers of `tree` itself.
        """
        if strict:
            self._check_containers(tree)
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        for path in self.entries:
            if not _reaches(tree, path):
                raise ValueError(
                    f"{self.what}{_keys(path)} has a spec, {self.entries[path].text}, but {_described(tree)} "
                    f"has nothing at that path; make {self.what} a prefix of that structure"
                )
        return [(_keys(path), self._spec_at(path, tree)) for path, _ in leaves]

    def _check_containers(self, tree):
        try:
            jax.tree.map(lambda *_: None, self.specs, tree, is_leaf=is_spec)
        except ValueError as error:
            raise ValueError(f"{self.what} is not a prefix of {_described(tree)}: {error}") from None

    def _spec_at(self, path, tree) -> AxisSpec:
        for length in range(len(path) + 1):
            if (spec := self.entries.get(path[:length])) is not None:
                return spec
        raise ValueError(
            f"{self.what} has no spec for the array at {_keys(path) or 'the top'} of {_described(tree)}; "
            f"it has specs for {', '.join(_keys(p) or 'the top' for p in self.entries) or 'nothing'}: "
            "add one, or give one spec for a whole subtree ([...] maps nothing)"
        )


def is_spec(entry) -> bool:
    if isinstance(entry, dict):
        return all(map(_is_name, entry.values())) and (not entry or any(isinstance(key, int) for key in entry))
    return isinstance(entry, (list, tuple)) and all(name is None or _is_name(name) for name in entry)


def _is_name(value) -> bool:
    return jax.tree_util.all_leaves([value])


def parse_spec(entry, where: str) -> AxisSpec:
    if isinstance(entry, dict) and all(isinstance(key, int) for key in entry):
        pairs, rank = [(name, position) for position, name in entry.items()], None
    elif isinstance(entry, (list, tuple)):
        named = entry[:-1] if len(entry) and entry[-1] is ... else entry
        rank = len(entry) if named is entry else None
        pairs = [(name, position) for position, name in enumerate(named) if name is not None]
        if ... in named:
            raise ValueError(
                f"{where} is {_text(entry)}; ... stands for the positions after the named ones, at the end"
            )
    else:
        raise TypeError(
            f"{where} is {entry!r}; a spec is a list of axis names for the leading positions (['i', ...], or ['i'] to "
            "assert the rank) or a dict from positions to names ({0: 'i'})"
        )
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError(f"{where} names an axis twice: {_text(entry)}; named axes are unique within one spec")
    if any(position < 0 for _, position in pairs):
        raise ValueError(f"{where} has a negative position: {_text(entry)}; count positions from the front")
    return AxisSpec(tuple(pairs), rank, _text(entry))


def _text(entry) -> str:
    return str(entry).replace("Ellipsis", "...")


def _keys(path) -> str:
    return jax.tree_util.keystr(path)


def _described(tree) -> str:
    text = str(jax.tree_util.tree_structure(tree)).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) < 200 else f"{text[:200]}..."


def _reaches(tree, path) -> bool:
    """Returns True if the containers of `tree` go as deep as `path`."""
    for key in path:
        children = dict(_children(tree))
        if key not in children:
            return False
        tree = children[key]
    return True


def _children(tree):
    """Returns the direct children of a container with their keys, empty containers included."""
    inner, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(path[0], child) for path, child in inner if path]
