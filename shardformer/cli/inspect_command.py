"""`inspect` and `diff`: the arrays of checkpoints, read on the host without a device."""

import json
import math
from typing import TypeVar

from shardformer import checkpoint
from shardformer.checkpoint.store import Location
from shardformer.cli.analysis_options import DiffOptions, InspectOptions
from shardformer.cli.arguments import run_folder, say, say_table, split_paths
from shardformer.config import parsing
from shardformer.convert import stored_arrays
from shardformer.convert.stored_arrays import StoredArray
from shardformer.errors import RunError, UsageError
from shardformer.tables import escape, format_bytes, format_count

T = TypeVar("T")


def inspect(arguments: list[str]) -> None:
    """Lists the arrays of a checkpoint; raises RunError for damage."""
    (path,), options = _parse_sources(
        arguments, 1, "inspect takes one run, checkpoint, shards or safetensors", InspectOptions
    )
    with stored_arrays.open_arrays(path) as arrays:
        say(_describe_source(path))
        say_table([_make_row(name, array, options.norms) for name, array in arrays.items()], _HEADER)
        count = sum(math.prod(array.shape) for array in arrays.values())
        total = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
        state = "all bytes read" if options.norms else "arrays not read (norms=false)"
        if options.norms and (path / "manifest.json").is_file():
            state += ", all checksums right"
        say(f"{format_count(len(arrays), 'array')}, {format_count(count, 'number')}, {format_bytes(total)}; {state}")


_HEADER = ["array", "shape", "dtype", "split", "norm", "largest", "note"]


def _make_row(name: str, array: StoredArray, norms: bool) -> list:
    row = [escape(name), "x".join(map(str, array.shape)) or "scalar", array.dtype.name, escape(array.spec)]
    if not norms:
        return [*row, None, None, ""]
    measured = stored_arrays.measure(array.read())
    return [*row, measured.norm, measured.largest, f"{measured.non_finite:,} not finite" if measured.non_finite else ""]


def diff(arguments: list[str]) -> int:
    """Lists the arrays that differ between two checkpoints; returns 1 if any does."""
    paths, options = _parse_sources(
        arguments, 2, "diff takes two of runs, checkpoints, shards or safetensors", DiffOptions
    )
    with stored_arrays.open_arrays(paths[0]) as ours, stored_arrays.open_arrays(paths[1]) as theirs:
        both = [name for name in ours if name in theirs]
        if not both:
            raise UsageError(f"{paths[0]} and {paths[1]} have no array of the same name; inspect shows their names")
        rows = [row for name in both if (row := _compare(name, ours[name], theirs[name]))]
        rows.sort(key=lambda row: -row[2])
        if rows:
            printed = [
                [escape(name), largest, relative, note] for name, largest, relative, note in rows[: options.most]
            ]
            say_table(printed, ["array", "largest difference", "relative to A", "note"])
        unpaired = [(paths[0], [name for name in ours if name not in theirs])]
        unpaired.append((paths[1], [name for name in theirs if name not in ours]))
    for path, names in unpaired:
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            say(f"only in {path}: {escape(', '.join(names[:5]))}{more}")
    say(f"arrays: {len(both) - len(rows)} equal, {len(rows)} different")
    return int(bool(rows) or any(names for _, names in unpaired))


def _compare(name: str, a: StoredArray, b: StoredArray) -> list | None:
    if a.shape != b.shape:
        shapes = ["x".join(map(str, array.shape)) for array in (a, b)]
        return [name, math.inf, math.inf, f"shape {shapes[0]} against {shapes[1]}"]
    note = f"{a.dtype} against {b.dtype}" if a.dtype != b.dtype else ""
    largest, relative = stored_arrays.measure_difference(a.read(), b.read())
    return [name, largest, relative, note] if largest or note else None


def _parse_sources(arguments: list[str], count: int, usage: str, options: type[T]) -> tuple[list[Location], T]:
    places, rest = split_paths(arguments)
    if len(places) != count:
        raise UsageError(usage)
    return [stored_arrays.find_source(run_folder(name)) for name in places], parsing.parse_options(rest, options)


def _describe_source(path: Location) -> str:
    """Returns the path and, for a checkpoint, its step, its best loss and its main settings."""
    try:
        progress = json.loads(checkpoint.read_document(path, "progress.json"))
        config = json.loads(checkpoint.read_document(path, "config.json"))
        keys = ("layers", "d_model", "heads", "seq", "vocab", "optimizer", "dtype", "mesh")
        settings = " ".join(f"{key}={config[key]}" for key in keys)
        best = progress["best"]
        summary = f"step {progress['step']}, best validation {best['val_loss']} at step {best['step']}"
        return "\n".join(map(escape, (str(path), summary, settings)))
    except (RunError, ValueError, KeyError, TypeError, RecursionError):
        return escape(str(path))
