"""Runs a learner's shard function on several meshes and says in words what is wrong."""

import functools
import inspect
import runpy
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from shardformer import exact
from shardformer.analysis import diagnosis
from shardformer.analysis.program_collectives import Collective, total_by_kind, wire_bytes
from shardformer.analysis.shard_check import compare_outputs
from shardformer.analysis.shard_runs import ShardRun, make_mesh, run_on_shards
from shardformer.course.lesson import Lesson, read_lesson
from shardformer.errors import UsageError, forbid_exit
from shardformer.tables import format_bytes

SLACK = 1.05  # bytes sent, relative to the solution's: more than this is worth a word

HINTS = {  # for errors whose own words do not name the mistake, by a part of the error
    "tracerboolconversionerror": " The value is known only on the device: choose with jnp.where, not with if.",
    "must match shard count": " Pass tiled=True to lax.psum_scatter.",
    "shape": " Compare the shapes with those of the blocks: does a full array meet a block, or lacks a mask [:, None]?",
}


class Verdict(NamedTuple):
    """The checker's answer: what is wrong (nothing if the function is right), and a picture of each mesh."""

    sentences: list[str]
    pictures: list[str]

    @property
    def passes(self) -> bool:
        return not self.sentences


def read_answer(path: Path) -> SimpleNamespace:
    """Runs a learner's file and returns its names."""
    try:
        with forbid_exit("it"):
            return SimpleNamespace(**runpy.run_path(str(path), run_name="lesson"))
    except SyntaxError as error:
        raise UsageError(f"{path}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        raise UsageError(f"{path} does not run: {describe_error(error, str(path))}") from None


def check(lesson: Lesson, answer: Any, path: str = "") -> Verdict:
    """Checks `answer.on_shard` on each mesh of the lesson; stops at the first mesh where it is wrong."""
    function = getattr(answer, "on_shard", None)
    if function is None:
        return Verdict(["the file has no function on_shard; `learn` writes the file again under another name"], [])
    pictures: list[str] = []
    for sizes in lesson.module.MESHES:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # JAX's defaults
            sentences, picture = _check_on_mesh(lesson, function, sizes, path)
        pictures += [picture] if picture else []
        if not sentences and hasattr(lesson.module, "check_more"):
            sentences = lesson.module.check_more(answer, sizes)
        if sentences:
            on = " ".join(f"{axis}={size}" for axis, size in sizes.items())
            return Verdict([f"on the mesh {on}: {sentence}" for sentence in sentences], pictures)
    return Verdict([], pictures)


def _check_on_mesh(lesson: Lesson, function: Callable, sizes: Mapping[str, int], path: str) -> tuple[list[str], str]:
    """Returns what is wrong, and a picture of what crossed the wire if the function ran."""
    module, device_mesh = lesson.module, make_mesh(sizes)
    arguments = module.make_arguments(np.random.default_rng(0), sizes)
    try:
        with forbid_exit("on_shard"):
            run = run_on_shards(function, arguments, module.IN_SPECS, device_mesh)
    except NotImplementedError:
        return [f"the hole is still open: {describe_hole(path)}"], ""
    except Exception as error:
        return [describe_error(error, path, getattr(module, "HINTS", {}) | HINTS)], ""
    picture = draw_wire(run.collectives, sizes)
    expected = exact.run(module.dense, *arguments).outputs
    names = tuple(inspect.signature(module.dense).parameters)
    wrong = compare_outputs(run, expected, module.OUT_SPECS, arguments, module.IN_SPECS, device_mesh, names)
    if wrong:
        known = _recognise(lesson, run, sizes)
        return ([known] if known else wrong), picture
    return _find_excess(lesson, run, arguments, device_mesh), picture


def _recognise(lesson: Lesson, run: ShardRun, sizes: Mapping[str, int]) -> str | None:
    """Returns the words of a known mistake that gives the same numbers, if possible with the same collectives."""
    candidates = []
    for index, mistake in enumerate(lesson.mistakes):
        other = _run_mistake(lesson.number, index, tuple(sizes.items()))
        if _have_equal_outputs(run, other):
            sentence = " ".join((mistake.__doc__ or "").split())
            candidates.append((_exchanges(other) != _exchanges(run), sentence))
    return min(candidates, key=lambda entry: entry[0])[1] if candidates else None


def _have_equal_outputs(run: ShardRun, other: ShardRun) -> bool:
    if not isinstance(run.outputs, dict) or run.outputs.keys() != other.outputs.keys():
        return False
    return all(diagnosis.equal(got, other.outputs[name]) for name, got in run.outputs.items())


@functools.cache
def _run_mistake(number: int, index: int, sizes: tuple[tuple[str, int], ...]) -> ShardRun:
    lesson = read_lesson(number)
    arguments = lesson.module.make_arguments(np.random.default_rng(0), dict(sizes))
    return run_on_shards(lesson.mistakes[index], arguments, lesson.module.IN_SPECS, make_mesh(dict(sizes)))


def _exchanges(run: ShardRun) -> set:
    """Returns which devices exchange with which, by operation."""
    return {(each.operation, each.groups) for each in run.collectives}


def _find_excess(lesson: Lesson, run: ShardRun, arguments: tuple, device_mesh) -> list[str]:
    """Compares the bytes that a right function sends with the solution's."""
    solution = run_on_shards(lesson.module.on_shard, arguments, lesson.module.IN_SPECS, device_mesh)
    got, enough = sent_bytes(run.collectives), sent_bytes(solution.collectives)
    if got <= SLACK * enough:
        return []
    types = ", ".join(sorted({each.operation for each in run.collectives}))
    return [f"the numbers are right, but each device sends {got:,.0f} bytes ({types}) where {enough:,.0f} are enough."]


def check_in_notebook(number: int, names: Mapping[str, Any]) -> None:
    """Prints the verdict on the functions of a notebook."""
    verdict = check(read_lesson(number), SimpleNamespace(**names))
    print("\n".join([*verdict.pictures, *verdict.sentences]))
    if verdict.passes:
        print(f"lesson {number} is right on every mesh")


def describe_hole(path: str) -> str:
    """Returns the words of the first hole of a learner's file, with its line."""
    for number, line in enumerate(Path(path).read_text().splitlines(), 1) if path else ():
        if "YOUR TURN: " in line:
            return f"line {number}, {line.partition('YOUR TURN: ')[2]}"
    return "write it in place of raise NotImplementedError."


def describe_error(error: Exception, path: str, hints: Mapping[str, str] | None = None) -> str:
    """Returns the kind, the first line and the place of an error in the learner's file, and the hint that fits."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f"line {lines[-1]} raises " if lines else ""
    first_line = str(error).strip().partition("\n")[0] or "no message"
    described = f"{type(error).__name__}: {first_line}"
    hint = next((hint for mark, hint in (hints or {}).items() if mark in described.lower()), "")
    return f"{where}{described.rstrip('.')}.{hint}"


def sent_bytes(collectives: list[Collective]) -> float:
    """Returns the bytes that one device sends in one run."""
    return sum(each.times * wire_bytes(each) for each in collectives)


def draw_wire(collectives: list[Collective], sizes: Mapping[str, int]) -> str:
    """Draws the mesh once for each kind of collective, with lines between the devices that exchange."""
    mesh = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    axes = tuple(sizes)
    types = total_by_kind(collectives, tuple(sizes.values()), axes)
    if not types:
        return f"mesh {mesh}: nothing crossed the wire"
    pictures = []
    for (operation, over), (tensors, sent) in types.items():
        count = f"{tensors} tensor{'s' if tensors > 1 else ''}"
        title = f"mesh {mesh}: {operation} over {over}, {count}, {format_bytes(sent)} sent by each device"
        pictures.append("\n".join([title, *draw_mesh(sizes, over.split(), operation)]))
    return "\n".join(pictures)


def draw_mesh(sizes: Mapping[str, int], over: list[str], operation: str) -> list[str]:
    """Returns lines: devices as [0], joined along the axes `over`."""
    drawn = [axis for axis, size in sizes.items() if size > 1] or list(sizes)[:1]
    if len(drawn) > 2:
        return []
    down, across = "" if len(drawn) == 1 else drawn[0], drawn[-1]
    rows, columns = sizes.get(down, 1), sizes[across]
    link = ("-->" if operation == "collective-permute" else "===") if across in over else "   "
    margin = " " * (len(down) + 4 if down else 2)
    lines = [margin + "   ".join(f"{across}{i}".center(4) for i in range(columns)).rstrip()]
    for row in range(rows):
        label = f"  {down}{row} ".ljust(len(margin)) if down else margin
        lines.append(label + link.join(f"[{row * columns + i:>2}]" for i in range(columns)))
        if down in over and row + 1 < rows:
            lines.append(margin + "   ".join(" || " for _ in range(columns)))
    return lines
