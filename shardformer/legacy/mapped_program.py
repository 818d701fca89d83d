"""One xmapped function at given shapes on a given mesh, as a function of whole arrays.

Each named axis is a `vmap` of that name, so collectives, random keys and gradients mean what they mean under vmap,
whatever the resources are; the resources only say how whole arrays are laid out, and the partitioner does the rest.
Beside `shard_map` over a mesh with logical names this is exact in more cases (an axis of 16 on 4 devices, a
collective inside of a `cond`, gradients taken outside) and needs less memory at the same speed: see README.md.
"""

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from shardformer.legacy import explicit
from shardformer.legacy.axis_specs import Axes, Specs
from shardformer.legacy.axis_resources import Placements, inside
from shardformer.legacy.serial_loops import in_turns


@dataclass(frozen=True, eq=False)
class Program:
    fun: Callable  # gives the function, which whoever calls holds; a program kept for later calls must not
    in_tree: Any
    inputs: tuple[Axes, ...]  # of each leaf of the arguments
    outputs: Specs
    sizes: dict[Hashable, int]
    placements: Placements
    strict: bool  # refuse a result that varies over an axis that its spec omits
    warnings: list[str] = field(default_factory=list)  # of the last tracing, for whoever called

    @property
    def name(self) -> str:
        fun = self.fun()
        return getattr(fun, "__name__", type(fun).__name__)

    def __call__(self, *args):
        for spread in self._ways():
            try:
                return self._as_specified(args, spread)
            except (NotImplementedError, AssertionError) as error:
                if not _is_of_jax(error):
                    raise
                refusal = error
        raise type(refusal)(
            f"jax refuses a part of the xmapped {self.name}: {refusal}. A collective over groups of instances, a "
            "permutation of some of them, or several names at once works only over axes that have a mesh axis of their "
            f"own with one position on each device, and not within another such xmap (axes: {self.sizes})"
        ) from refusal

    def _ways(self) -> Iterator[Callable]:
        yield self._by_vmap
        if explicit.one_to_one(self.placements, self.sizes) and not explicit.is_around():
            yield functools.partial(explicit.over_devices, self)

    def _as_specified(self, args, spread: Callable):
        """The results as their specs say, or else at index 0."""
        try:
            return self._mapped(args, spread)
        except NameError as error:
            self._explain_loops(error)
            raise
        except ValueError as error:
            if not (_is_of_jax(error) or isinstance(error, explicit.NotShown)):
                raise
            refused = error
        # This raises again whatever was not an objection to a result.
        result = self._mapped(args, functools.partial(spread, index_0=True))
        self._tell_omitted(refused)
        return result

    def _explain_loops(self, error: NameError):
        if not _is_of_jax(error):
            return
        if looped := {name: loops for name in self.sizes if (loops := self.placements[name].loops)}:
            told = "; ".join(f"{name!r} over {', '.join(str(loop) for loop, _ in on)}" for name, on in looped.items())
            raise RuntimeError(
                f"the body has a collective ({error}); it cannot reach over an axis that axis_resources runs in turns "
                f"of a serial loop ({told}): give such an axis mesh axes, or no resources"
            ) from error

    def _tell_omitted(self, refused: ValueError):
        varies = "is not shown to be the same along" if isinstance(refused, explicit.NotShown) else "varies over"
        message = (
            f"a result of the xmapped {self.name} {varies} a named axis that its "
            f"out_axes spec omits (specs: {', '.join(axes.text for axes in self.outputs.distinct)}; "
            f"axes: {', '.join(map(repr, self.sizes))})"
        )
        if self.strict:
            raise TypeError(f"{message}; name the axis in the spec, or reduce over it in the body") from refused
        self.warnings.append(f"{message}; its value at index 0 is returned. strict=True makes this an error")

    def _mapped(self, args, spread: Callable):
        """The function of whole arrays, where `spread(body)` is the body mapped over every named axis."""
        found = {}

        def body(*leaves):
            # The results travel in one list for each spec, because vmap wants a prefix that describes them.
            result = self.fun()(*jax.tree.unflatten(self.in_tree, leaves))
            matched = self.outputs.match(result, self.strict)
            found["tree"] = jax.tree.structure(result)
            found["specs"] = [self.outputs.distinct.index(axes) for _, axes in matched]
            by_spec = [[] for _ in self.outputs.distinct]
            for leaf, (path, axes), spec in zip(jax.tree.leaves(result), matched, found["specs"], strict=True):
                self._check_result(leaf, f"result{path}", axes)
                by_spec[spec].append(leaf)
            return by_spec

        with inside(self.placements):
            by_spec = spread(body)(*jax.tree.leaves(args))
        queues = [
            iter([self._laid_out(leaf, axes) for leaf in results])
            for axes, results in zip(self.outputs.distinct, by_spec, strict=True)
        ]
        return jax.tree.unflatten(found["tree"], [next(queues[spec]) for spec in found["specs"]])

    def _laid_out(self, leaf, axes: Axes):
        if self.placements.mesh is None:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, self.placements.sharding(axes))

    def _check_result(self, leaf, what: str, axes: Axes):
        """A result of the body lacks its named axes yet; the spec speaks of the whole array."""
        shape = list(jnp.shape(leaf))
        for name, position in sorted(axes.positions, key=lambda placed: placed[1]):
            shape.insert(position, self.sizes[name])
        axes.check(tuple(shape), what)
        self.placements.check_apart(axes.names, what)

    def _by_vmap(self, body, index_0: bool = False):
        return self._over_loops(self.over_axes(body, list(self.sizes), index_0=index_0))

    def over_axes(self, body, names: list, outer=(), index_0: bool = False):
        """One vmap for each of `names`, the first outermost; the axes `outer` are gone from the arrays already."""
        for depth in reversed(range(len(names))):
            body = self._over_axis(body, names[depth], (*outer, *names[:depth]), index_0)
        return body

    def _over_axis(self, body, name, outer: tuple, index_0: bool):
        placement = self.placements[name]
        positions = [axes.position(name, outer) for axes in self.outputs.distinct]
        mapped = jax.vmap(
            body,
            in_axes=tuple(axes.position(name, outer) for axes in self.inputs),
            out_axes=[0 if position is None and index_0 else position for position in positions],
            # A turn of a loop sees a slice of the axis only: without the name, a collective over it is an error.
            axis_name=None if placement.loops else name,
            axis_size=self.sizes[name] // placement.turns,
            spmd_axis_name=placement.mesh_axes or None,
        )
        if not index_0:
            return mapped

        if self.sizes[name] == 0 and None in positions:
            raise ValueError(f"the axis {name!r} has size 0: a result whose spec omits it has no value to return")

        def at_index_0(*leaves):
            return [
                [leaf[0] for leaf in results] if position is None else results
                for results, position in zip(mapped(*leaves), positions, strict=True)
            ]

        return at_index_0

    def _over_loops(self, body):
        loops = dict(loop for name in self.sizes for loop in self.placements[name].loops)
        for loop, length in reversed(loops.items()):
            taken = [self._turning(axes, loop) for axes in self.inputs]
            given = [self._turning(axes, loop) for axes in self.outputs.distinct]
            body = in_turns(body, length, taken, given)
        return body

    def _turning(self, axes: Axes, loop) -> int | None:
        """The position whose slices take turns in `loop`, if any."""
        found = [position for name, position in axes.positions if loop in dict(self.placements[name].loops)]
        return found[0] if found else None


def _is_of_jax(error: Exception) -> bool:
    """Whether jax itself raised it, and not the function that is mapped."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "jax"
