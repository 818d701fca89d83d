"""Conversion between GPT-J's shards and full arrays under our names, with or without the optimizer's moments."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardformer.config import Config
from shardformer.convert import gptj, shard_files
from shardformer.convert.gptj import HEAD_BIAS, TABLE, TABLE_BIAS, Leaf
from shardformer.convert.leaves import Array, Filled, Leaves, Moments, State
from shardformer.convert.shard_files import Member
from shardformer.errors import RunError, UsageError


class Entry(NamedTuple):
    """One array per shard, in the order of {"opt_state": (count, mu, nu, count), "params": ..., "step": ...}."""

    part: str
    leaf: Leaf | None = None  # none for a counter

    @property
    def name(self) -> str:
        return f"{self.part}/{self.leaf.name}" if self.leaf else self.part


Columns = dict[Entry, list[Member]]  # each array's part on every shard


def list_entries(config: Config, with_moments: bool) -> list[Entry]:
    leaves = gptj.list_leaves(config)
    moments = [gptj.as_moment(leaf) for leaf in leaves]
    optimizer = [Entry("count"), *(Entry(part, leaf) for part in ("mu", "nu") for leaf in moments), Entry("schedule")]
    return [*(optimizer if with_moments else []), *(Entry("params", leaf) for leaf in leaves), Entry("step")]


def open_state(folder: Path, config: Config, with_moments: bool = True) -> State:
    """Opens the state of a folder without reading its arrays; moments are None if absent or not wanted."""
    count = shard_files.count_shards(folder)
    gptj.check_expressible(config, count)
    stored = [shard_files.list_members(folder, shard) for shard in range(count)]
    entries = list_entries(config, with_moments=_has_moments(folder, stored, config))
    shapes = gptj.list_shapes(config)
    for shard in stored:
        for entry, member in zip(entries, shard, strict=True):
            _check(entry, member, shapes, count)
    columns = {entry: list(members) for entry, members in zip(entries, zip(*stored, strict=True), strict=True)}
    params, mu, nu = (_joined(columns, config, part, shapes) for part in ("params", "mu", "nu"))
    moments = Moments(_number(columns, "count"), mu, nu) if with_moments and Entry("count") in columns else None
    return State(_number(columns, "step"), params, moments)


def write_state(folder: Path, config: Config, state: State, count: int, dtype: np.dtype) -> None:
    """Writes a state as `count` shards, with parameters in `dtype`."""
    gptj.check_expressible(config, count)
    parts = {"params": state.params}
    values = {"step": state.step, "schedule": state.step}
    if state.moments:
        parts |= {"mu": state.moments.mu, "nu": state.moments.nu}
        values["count"] = state.moments.steps
    entries = list_entries(config, with_moments=state.moments is not None)

    def part_of(entry: Entry, shard: int) -> np.ndarray:
        if entry.leaf is None:
            return np.array(values[entry.part], np.int32)
        part = _cut(config, entry, parts[entry.part], shard, count)
        return part.astype(dtype) if entry.part == "params" else part

    for shard in range(count):
        shard_files.write_shard(folder, shard, [functools.partial(part_of, entry, shard) for entry in entries])


def _has_moments(folder: Path, stored: list[list[Member]], config: Config) -> bool:
    for shard, members in enumerate(stored):
        if len(members) != len(stored[0]):
            raise RunError(
                f"{folder / f'shard_{shard}'} has {len(members)} arrays where shard_0 has {len(stored[0])}: "
                "they belong to different checkpoints; copy it again"
            )
    expected = {_count_entries(config, with_moments): with_moments for with_moments in (False, True)}
    if len(stored[0]) not in expected:
        slim, full = sorted(expected)
        raise UsageError(
            f"{folder} has {len(stored[0])} arrays per shard; layers={config.model.layers} "
            f"positions={config.model.positions} make "
            f"{slim}, or {full} with Adam's moments; give config=FILE.json of this model, or layers=..."
        )
    return expected[len(stored[0])]


def _count_entries(config: Config, with_moments: bool) -> int:
    """Counts the entries without listing them: a damaged configuration may have more layers than a list can hold."""
    one, two = (len(list_entries(config.replace(layers=layers), with_moments)) for layers in (1, 2))
    return one + (config.model.layers - 1) * (two - one)


def _check(entry: Entry, member: Member, shapes: dict[str, tuple[int, ...]], count: int) -> None:
    leaf = entry.leaf
    expected = gptj.part_shape(leaf, shapes[leaf.rule.ours], count) if leaf else ()
    if member.shape != expected:
        raise UsageError(
            f"{member.path}: {entry.name} is {list(member.shape)}, and this configuration in {count} shards makes it "
            f"{list(expected)}; give config=FILE.json of this model, or copy the shards that are missing"
        )
    known = ("float32", "bfloat16", "float16") if leaf else ("int32", "int64", "uint32")
    if member.dtype.name not in known:
        raise RunError(f"{member.path}: {entry.name} is {member.dtype}, expected one of {', '.join(known)}")


def _joined(columns: Columns, config: Config, part: str, shapes: dict[str, tuple[int, ...]]) -> Leaves:
    """Returns the full arrays of a part of the state, under our names."""
    sources: dict[str, list[tuple[Leaf, list[Member]]]] = {}
    for (entry_part, leaf), members in columns.items():
        if entry_part == part and leaf is not None:
            sources.setdefault(leaf.rule.ours, []).append((leaf, members))
    table_bias = None if config.model.embed == "bias" else sources.pop(TABLE_BIAS, None)

    def fill(name: str, whole: np.ndarray) -> None:
        for leaf, members in sources[name]:
            leaf.rule.shards.join(members, whole if leaf.layer is None else whole[leaf.layer])
            if leaf.rule.gathered:
                whole /= _excess(part, len(members))
        if part == "params" and name == TABLE and table_bias:
            bias = np.empty(shapes[TABLE_BIAS], np.float32)
            ((leaf, members),) = table_bias
            leaf.rule.shards.join(members, bias)
            whole += bias[None]
        if part == "params" and name == HEAD_BIAS:
            whole[config.model.vocab :] = 0  # the model's mask keeps them from being predicted

    return {name: Filled(shapes[name], np.dtype(np.float32), functools.partial(fill, name)) for name in sources}


def _cut(config: Config, entry: Entry, leaves: Leaves, shard: int, count: int) -> np.ndarray:
    """Returns one shard's part of an array; parameters that only GPT-J's code has get values that change nothing."""
    leaf = entry.leaf
    assert leaf is not None  # a counter is not split
    rule, name = leaf.rule, leaf.rule.ours
    layer = () if leaf.layer is None else (leaf.layer,)
    whole: Array
    if name == TABLE_BIAS and name not in leaves:  # the table took it up
        whole = np.full(config.model.d_model, -0.0 if entry.part == "params" else 0.0, np.float32)
    elif name == HEAD_BIAS and entry.part == "params":
        whole = np.array(leaves[name])
        whole[config.model.vocab :] = gptj.PREDICTED_NEVER
    else:
        whole = leaves[name]
    part = rule.shards.cut(whole, layer, shard, count)
    return part * _excess(entry.part, count) if rule.gathered else part


def _excess(part: str, count: int) -> np.float32:
    """Returns the factor by which GPT-J's moments of a gathered parameter are too large."""
    return np.float32({"params": 1, "mu": count, "nu": count**2}[part])


def _number(columns: Columns, part: str) -> int:
    return int(columns[Entry(part)][0].read())
