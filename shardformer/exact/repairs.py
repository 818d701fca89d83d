"""Finds the line where a program goes wrong: the change of this line that makes the results right.

Many results of a sharded program differ between devices for good reasons, so no look at a wrong program shows where
its mistake is. But a run takes milliseconds: each line is tried with another sum over devices.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy import ndarray

from shardformer.exact import jaxprs
from shardformer.exact.interpreter import Change, Run, run_jaxpr
from shardformer.exact.lockstep import Collectives, Mesh
from shardformer.exact.operations import is_float
from shardformer.exact.source_lines import describe_calls, find_calls, find_positions

# Operations that add up elements: their results are partial sums where these elements are split over devices.
SUMMING = ("dot_general", "reduce_sum", "conv_general_dilated", "scatter-add", "ragged_dot_general", "cumsum")


class Site(NamedTuple):
    """The equations that come from one expression of a program, by one way of calls."""

    operation: str
    calls: tuple[str, ...]
    positions: tuple[int, ...]


# {site: (the axes of its psum, the axes over which its results vary)}
Sites = dict[Site, tuple[tuple[str, ...], tuple[str, ...]]]


class Repair(NamedTuple):
    """A change that makes a program right."""

    site: Site
    removed: tuple[str, ...]  # the axes of a psum that is there
    added: tuple[str, ...]  # the axes of the psum that is needed

    def __str__(self) -> str:
        line = describe_calls(self.site.calls)
        if not self.removed:
            return f"a psum over {_join(self.added)} is missing after {line}"
        if not self.added:
            return f"the psum over {_join(self.removed)} is one too many at {line}"
        return f"the psum is over {_join(self.removed)}, expected over {_join(self.added)}, at {line}"


def find_repair(
    closed, leaves: Sequence, is_right: Callable[[Run], bool], seconds: float = 60, only_missing: bool = False
) -> Repair | None:
    """Returns a change of one line's sums over devices that makes the wrong results of a traced program right.

    only_missing: every psum of the program is right.
    """
    until, sites = time.monotonic() + seconds, _find_sites(closed, leaves)
    for repair in [*([] if only_missing else _change_sums(sites)), *_add_sums(sites)]:
        if time.monotonic() > until:
            break
        if is_right(run_jaxpr(closed, leaves, change=_make_change(repair))):
            return repair
    return None


def explain(function: Callable, *arguments) -> list[str]:
    """Returns a sentence for devices that should agree and do not, and for results that are not finite.

    Each names the line where the mistake begins. JAX itself checks the former for a shard_map with `check_vma=True`.

    >>> import jax.numpy as jnp, numpy as np
    >>> from shardformer import exact
    >>> exact.explain(lambda x: jnp.log(x) * 2, np.zeros(3, np.float32))
    ['a result is not finite: the first such value is from ...']
    """
    closed, leaves = jax.make_jaxpr(function)(*arguments), jax.tree.leaves(arguments)
    result, sentences = run_jaxpr(closed, leaves), []
    for found in result.disagreements:
        repair = find_repair(closed, leaves, lambda run: not run.disagreements, only_missing=True)
        where = f": {repair}" if repair else ""
        sentences.append(f"output {found.output} differs by {found.difference:.2g} between the devices of "
                         f"{found.axis}, which should agree{where}")  # fmt: skip
        break  # the others have the same reason, or show up without it
    if not _are_finite(result.outputs):
        line = find_non_finite(closed, leaves)
        sentences.append(f"a result is not finite{f': the first such value is from {line}' if line else ''}")
    return sentences


def find_non_finite(closed, leaves: Sequence) -> str | None:
    """Returns the first line whose finite inputs give a NaN or an infinity that reaches the results.

    Masks use infinities, and gathers NaNs, that reach none: with zeros in their place, the results are no better.
    """
    sources: dict[Site, None] = {}

    def find_sources(equation, inputs, results, mesh: Mesh):
        if not jaxprs.bodies(equation) and _are_finite(inputs) and not _are_finite(results):
            sources[_find_site(equation)] = None
        return results

    run_jaxpr(closed, leaves, change=find_sources)
    for source in sources:

        def remove(equation, inputs, results, mesh: Mesh, source=source):
            if equation.primitive.name != source.operation or _find_site(equation) != source:
                return results
            return [np.where(np.isfinite(x), x, 0) if x.dtype.kind in "fc" else x for x in results]

        if _are_finite(run_jaxpr(closed, leaves, change=remove).outputs):
            return describe_calls(source.calls)
    return None


def _are_finite(arrays: Sequence[ndarray]) -> bool:
    return all(x.dtype.kind not in "fc" or bool(np.isfinite(x).all()) for x in arrays)


def _find_sites(closed, leaves: Sequence) -> Sites:
    """Returns {site: (the axes of its psum, the axes over which its results vary)}, in the program's order."""
    sites: Sites = {}

    def record(equation, inputs, results, mesh: Mesh):
        name = equation.primitive.name
        # A jitted function counts too: JAX traces it once, so its operations name only the first line that calls it.
        if mesh and not jaxprs.bodies(equation) and name != "shard_map":
            sums = jaxprs.find_axes(equation) if _adds(name) else ()
            varying = [axis for i, axis in enumerate(mesh) if any(x.shape[i] > 1 for x in _floats(equation, results))]
            site = _find_site(equation)
            before = sites.get(site, ((), ()))[1]
            sites[site] = sums, tuple(axis for axis in mesh if axis in varying or axis in before)
        return results

    run_jaxpr(closed, leaves, change=record)
    return sites


def _change_sums(sites: Sites) -> Iterator[Repair]:
    """Yields a psum less, and then a psum over other axes."""
    axes_of_mesh = tuple(dict.fromkeys(axis for sums, varying in sites.values() for axis in (*sums, *varying)))
    psums = {site: sums for site, (sums, _) in sites.items() if sums}
    yield from (Repair(site, sums, ()) for site, sums in psums.items())
    for site, sums in psums.items():
        yield from (Repair(site, sums, other) for other in _subsets(axes_of_mesh) if set(other) != set(sums))


def _add_sums(sites: Sites) -> Iterator[Repair]:
    """Yields a psum more: first after operations that sum elements."""
    for summing in (True, False):
        for site, (sums, varying) in sites.items():
            if not sums and (site.operation in SUMMING) == summing:
                yield from (Repair(site, (), added) for added in _subsets(varying))


def _make_change(repair: Repair) -> Change:
    def change(equation, inputs, results, mesh: Mesh):
        if not mesh or equation.primitive.name != repair.site.operation or _find_site(equation) != repair.site:
            return results
        before = inputs if repair.removed else results
        if not repair.added:
            return before
        # A name that other shard_maps of the program have is no axis of this one.
        psum = Collectives(mesh, [axis for axis in repair.added if axis in mesh])
        return [psum.reduce(x, np.add) if x.dtype.kind in "fc" else x for x in before]

    return change


def _find_site(equation) -> Site:
    return Site(equation.primitive.name, find_calls(equation), find_positions(equation))


def _adds(name: str) -> bool:
    return jaxprs.COLLECTIVES.get(name) == "all-reduce" and name not in ("pmax", "pmin")


def _floats(equation, results: list[ndarray]) -> list[Any]:
    return [x for x, variable in zip(results, equation.outvars, strict=True) if is_float(variable.aval.dtype)]


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns single axes first."""
    rest = [tuple(axis for i, axis in enumerate(axes) if bits >> i & 1) for bits in range(1, 2 ** len(axes))]
    return sorted(rest, key=len)


def _join(axes: tuple[str, ...]) -> str:
    return " and ".join(axes)
