"""A model, with or without its optimizer's moments, between GPT-J's shards and whole arrays under our names."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardformer.config import Config
from shardformer.convert import gptj, shard_files
from shardformer.convert.gptj import Leaf, Leaves
from shardformer.convert.shard_files import Member
from shardformer.errors import RunError, UsageError


class Moments(NamedTuple):
    """Adam's."""

    count: int
    mu: Leaves
    nu: Leaves


class State(NamedTuple):
    step: int
    params: Leaves
    moments: Moments | None = None


class Entry(NamedTuple):
    """One array per shard, in the order of {"opt_state": (count, mu, nu, count), "params": ..., "step": ...}."""

    part: str
    leaf: Leaf | None = None  # none for a counter

    @property
    def name(self) -> str:
        return f"{self.part}/{self.leaf.name}" if self.leaf else self.part


def entries(config: Config, with_moments: bool) -> list[Entry]:
    leaves = gptj.leaves(config)
    moments = [gptj.of_moments(leaf) for leaf in leaves]
    optimizer = [Entry("count"), *(Entry(part, leaf) for part in ("mu", "nu") for leaf in moments), Entry("schedule")]
    return [*(optimizer if with_moments else []), *(Entry("params", leaf) for leaf in leaves), Entry("step")]


def read(folder: Path, config: Config, with_moments: bool = True) -> State:
    """What a folder holds; moments are left out if it has none, or if they are not wanted."""
    count = shard_files.count(folder)
    gptj.check(config, count)
    stored = [shard_files.members(folder, shard) for shard in range(count)]
    held = entries(config, with_moments=_has_moments(folder, stored, config))
    shapes = gptj.shapes(config)
    for shard in stored:
        for entry, member in zip(held, shard, strict=True):
            _check(entry, member, shapes, count)
    wanted = entries(config, with_moments)
    columns = {entry: [shard[i] for shard in stored] for i, entry in enumerate(held) if entry in wanted}
    params = gptj.native(config, _join(columns, "params", shapes))
    moments = None
    if Entry("count") in columns:
        mu, nu = (_join(columns, part, shapes) for part in ("mu", "nu"))
        moments = Moments(_number(columns, "count"), _kept(config, mu), _kept(config, nu))
    return State(_number(columns, "step"), params, moments)


def write(folder: Path, config: Config, state: State, count: int, dtype: np.dtype) -> None:
    """`count` shards of it, the parameters in `dtype`."""
    gptj.check(config, count)
    parts = {"params": gptj.foreign(config, state.params)}
    numbers = {"step": state.step, "schedule": state.step}
    if state.moments:
        bias = {gptj.TABLE_BIAS: np.zeros(config.d_model, np.float32)}
        parts |= {"mu": bias | state.moments.mu, "nu": bias | state.moments.nu}
        numbers["count"] = state.moments.count
    held = entries(config, with_moments=state.moments is not None)

    def of_shard(shard: int) -> Iterator[np.ndarray]:
        for entry in held:
            if entry.leaf is None:
                yield np.array(numbers[entry.part], np.int32)
            else:
                part = _cut(entry, parts[entry.part][entry.leaf.rule.ours], count)[shard]
                yield part.astype(dtype) if entry.part == "params" else part

    for shard in range(count):
        shard_files.write(folder, shard, list(of_shard(shard)))


def _has_moments(folder: Path, stored: list[list[Member]], config: Config) -> bool:
    for shard, members in enumerate(stored):
        if len(members) != len(stored[0]):
            raise RunError(
                f"{folder / f'shard_{shard}'} has {len(members)} arrays where shard_0 has {len(stored[0])}: "
                "they are not of one checkpoint; copy it again"
            )
    expected = {len(entries(config, with_moments)): with_moments for with_moments in (False, True)}
    if len(stored[0]) not in expected:
        slim, full = sorted(expected)
        raise UsageError(
            f"{folder} has {len(stored[0])} arrays per shard; layers={config.layers} positions={config.positions} make "
            f"{slim}, or {full} with Adam's moments; give config=FILE.json of this model, or layers=..."
        )
    return expected[len(stored[0])]


def _check(entry: Entry, member: Member, shapes: dict[str, tuple[int, ...]], count: int) -> None:
    rule = entry.leaf and entry.leaf.rule
    expected = gptj.part_shape(entry.leaf, shapes[rule.ours], count) if rule else ()
    if member.shape != expected:
        raise UsageError(
            f"{member.path}: {entry.name} is {list(member.shape)}, and this configuration in {count} shards makes it "
            f"{list(expected)}; give config=FILE.json of this model, or copy the shards that are missing"
        )
    known = ("float32", "bfloat16", "float16") if rule else ("int32", "int64", "uint32")
    if member.dtype.name not in known:
        raise RunError(f"{member.path}: {entry.name} is {member.dtype}, expected one of {', '.join(known)}")


def _join(columns: dict[Entry, list[Member]], part: str, shapes: dict[str, tuple[int, ...]]) -> Leaves:
    joined: Leaves = {}
    for (_, leaf), members in ((entry, members) for entry, members in columns.items() if entry.part == part):
        rule = leaf.rule
        whole = joined.setdefault(rule.ours, np.empty(shapes[rule.ours], np.float32))
        whole[... if leaf.layer is None else leaf.layer] = rule.shards.join([member.read() for member in members])
        if rule.gathered:
            whole /= _excess(part, len(members))
    return joined


def _cut(entry: Entry, whole: np.ndarray, count: int) -> list[np.ndarray]:
    rule, layer = entry.leaf.rule, entry.leaf.layer
    parts = rule.shards.cut(whole if layer is None else whole[layer], count)
    return [part * _excess(entry.part, count) for part in parts] if rule.gathered else parts


def _excess(part: str, count: int) -> np.float32:
    """How many times too large a gathered parameter's moment is in GPT-J."""
    return np.float32({"params": 1, "mu": count, "nu": count**2}[part])


def _kept(config: Config, moments: Leaves) -> Leaves:
    """Without a bias that the table takes up; its rows' gradients are what they were."""
    return {name: leaf for name, leaf in moments.items() if name != gptj.TABLE_BIAS or config.embed_bias}


def _number(columns: dict[Entry, list[Member]], part: str) -> int:
    return int(columns[Entry(part)][0].read())
