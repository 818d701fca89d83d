"""One xmapped function at given shapes on a given mesh, as a function of unsharded arrays.

There are two ways to map a body over named axes:

- `shard_map` over a mesh with the logical names. Each device runs the body, and a collective is one between devices.
  It serves calls whose placed axes have one position on each device; the other axes are vmaps inside.
- A `vmap` of that name for each axis. The resources only decide the layout of unsharded arrays, and XLA's partitioner
  places the collectives. It serves longer axes, collectives in a branch, layouts and xmaps within the body, and calls
  under grad, vmap or jit, since a gradient from outside is exact only under vmap.

vmap also traces every body first: its errors, and the results that vary over an axis that their spec omits, do not
depend on the resources.

Measured as the full xmap of mesh-transformer-jax's train step (4 layers, d_model 256, 1,024 tokens, 2 cores):
jax 0.10.2, 4x2 bfloat16, both interleaved on a busy machine: vmap takes 583 ms of CPU time and 20.0 MB of temporary
memory, shard_map 423 ms and 31.3 MB. XLA copies transposed operands of products for vmap, and folds them for shard_map.
"""

import contextlib
import functools
import traceback
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from shardformer.legacy.axis_resources import Placement, Placements, names_in_scope, tracing_body
from shardformer.legacy.axis_specs import AxisSpec, SpecTree
from shardformer.legacy.migration.shard_map_helpers import placed_axes
from shardformer.legacy.shard_map_program import (
    NotProvenEqual,
    axes_one_per_device,
    computes_the_same,
    is_inside_renamed_mesh,
    map_over_devices,
)


@dataclass(frozen=True, eq=False)
class MappedProgram:
    fun: Callable  # a weak reference to the function: a program that is kept for later calls must not hold it
    in_tree: Any
    inputs: tuple[AxisSpec, ...]  # of each leaf of the arguments
    outputs: SpecTree
    sizes: dict[Hashable, int]
    placements: Placements
    strict: bool  # refuse a result that varies over an axis that its spec omits
    transformed: bool  # whether it is called under grad, vmap or jit
    warnings: list[str] = field(default_factory=list)  # of the last tracing, for the caller

    @property
    def name(self) -> str:
        fun = self.fun()
        return getattr(fun, "__name__", type(fun).__name__)

    def __call__(self, *args):
        if self._is_one_per_device():
            return self._prefer_devices(args)
        return self._map(*args)

    def _is_one_per_device(self) -> bool:
        """Returns True if all placed axes have one position on each device, and no gradient is taken outside."""
        placed = [name for name in self.sizes if self.placements[name].mesh_axes]
        on_devices = axes_one_per_device(self.placements, self.sizes)
        is_final = not self.transformed and not jax.config.jax_disable_jit  # type: ignore[attr-defined]
        return bool(placed) and list(on_devices) == placed and is_final and not is_inside_renamed_mesh()

    def _prefer_devices(self, args):
        """Maps the body by shard_map if that is known to compute the same as vmap, which finds the errors."""
        reported = len(self.warnings)
        by_vmap = jax.jit(self._map, inline=True)  # a jit is traced once, for its check and for its result
        jax.eval_shape(by_vmap, *args)
        mapper = functools.partial(map_over_devices, self, index_0=len(self.warnings) > reported, proven=True)
        on_devices = jax.jit(lambda *args: self._mapped(args, mapper, {}), inline=True)
        names = axes_one_per_device(self.placements, self.sizes)
        try:
            is_same = computes_the_same(jax.make_jaxpr(on_devices)(*args), names)
        except (NotImplementedError, AssertionError) as error:
            if not raised_by_jax(error):
                raise
            is_same = False
        return on_devices(*args) if is_same else by_vmap(*args)

    def _map(self, *args):
        for mapper in self._mappers():
            try:
                return self._map_with(mapper, args)
            except (NotImplementedError, AssertionError) as error:
                if not raised_by_jax(error) or _is_about_gradients(error):
                    raise
                refusal = error
        raise type(refusal)(
            f"jax rejects a part of the xmapped {self.name}: {refusal}. A collective over groups of instances, a "
            "permutation of some of them, or several names at once works only over axes with one position on each "
            "device, whose mesh axes no other axis uses and are neighbours in the mesh, in its order; and not within "
            f"another such xmap (axes: {self.sizes})"
        ) from refusal

    def _mappers(self) -> Iterator[Callable]:
        """The ways to map a body over all named axes, the best first."""
        yield self._by_vmap
        if axes_one_per_device(self.placements, self.sizes) and not is_inside_renamed_mesh():
            yield functools.partial(map_over_devices, self)

    def _map_with(self, mapper: Callable, args):
        """The results as their specs say, at index 0 of an axis that a result varies over and its spec omits."""
        structure: dict[str, Any] = {}
        try:
            return self._mapped(args, mapper, structure)
        except NameError as error:
            self._explain_unbound_name(error)
            raise
        except ValueError as error:
            # Before the body has returned, it is an error of the body, and no objection to its structure.
            if not isinstance(error, NotProvenEqual) and not ("tree" in structure and raised_by_jax(error)):
                raise
            refused = error
        # This raises again whatever was not an objection to a result.
        result = self._mapped(args, functools.partial(mapper, index_0=True), {})
        self._report_omitted(refused)
        return result

    def _explain_unbound_name(self, error: NameError):
        """Lists the names in scope, in the error itself, so that its traceback still ends in the caller's code."""
        rest = str(error).partition("unbound axis name: ")[2]
        if not rest or not raised_by_jax(error) or "named axes in scope" in rest:  # an inner xmap has explained it
            return
        name = rest.partition(". To fix")[0]
        looped = {axis: loops for axis in self.sizes if (loops := self.placements[axis].loops)}
        if name in map(str, looped):
            listed = "; ".join(f"{axis!r} over {', '.join(str(loop) for loop, _ in on)}" for axis, on in looped.items())
            raise RuntimeError(
                f"the body has a collective over {name!r}; it cannot reach over an axis that axis_resources maps to a "
                f"serial loop ({listed}): give such an axis mesh axes, or no resources"
            ) from error
        in_scope = list(dict.fromkeys([*names_in_scope(), *self.sizes]))
        message = f"unbound axis name: {name} (in the xmapped {self.name}, where the named axes in scope are "
        message += f"{', '.join(map(repr, in_scope)) or 'none'})"
        if spelled := [other for other in in_scope if isinstance(other, str) and len(name) == 1 and name in other]:
            message += f"; for {spelled[0]!r} write ({spelled[0]!r},): jax reads a string as its letters"
        error.args = (message,)

    @contextlib.contextmanager
    def _naming_taken_axes(self):
        """Raises jax 0.4's type of error where the body splits a value over a mesh axis that a named axis has."""
        try:
            yield
        except Exception as error:
            taken = {axis: name for name, placement in self.placements.by_name for axis in placement.mesh_axes}
            axis = next((axis for axis in taken if _is_about_taken_axis(str(error), axis)), None)
            if axis is None:
                raise
            raise jax.errors.JAXTypeError(
                f"the xmapped {self.name} splits a value over the mesh axis {axis!r}, which axis_resources gives to "
                f"{taken[axis]!r}; leave it out of the spec ({error})"
            ) from error

    def _report_omitted(self, refused: ValueError):
        varies = "is not known to be the same along" if isinstance(refused, NotProvenEqual) else "varies over"
        message = (
            f"a result of the xmapped {self.name} {varies} a named axis that its "
            f"out_axes spec omits (specs: {', '.join(axes.text for axes in self.outputs.distinct)}; "
            f"axes: {', '.join(map(repr, self.sizes))})"
        )
        if self.strict:
            raise TypeError(f"{message}; name the axis in the spec, or reduce over it in the body") from refused
        self.warnings.append(f"{message}; its value at index 0 is returned. strict=True makes this an error")

    def _mapped(self, args, mapper: Callable, structure: dict):
        """The function of whole arrays; `mapper(body)` is the body mapped over every named axis.

        structure: receives the structure of the results, once the body has returned.
        """

        def body(*leaves):
            # The results travel in one list for each spec, because vmap wants a prefix that describes them.
            with self._naming_taken_axes():
                result = self.fun()(*jax.tree.unflatten(self.in_tree, leaves))
            matched = self.outputs.match(result, self.strict)
            structure["tree"] = jax.tree.structure(result)
            structure["specs"] = [self.outputs.distinct.index(axes) for _, axes in matched]
            by_spec = [[] for _ in self.outputs.distinct]
            for leaf, (path, axes), spec in zip(jax.tree.leaves(result), matched, structure["specs"], strict=True):
                self._check_result(leaf, f"result{path}", axes)
                by_spec[spec].append(leaf)
            return by_spec

        with tracing_body(self.placements):
            by_spec = mapper(body)(*jax.tree.leaves(args))
        queues = [
            iter([self._constrain_layout(leaf, axes) for leaf in results])
            for axes, results in zip(self.outputs.distinct, by_spec, strict=True)
        ]
        return jax.tree.unflatten(structure["tree"], [next(queues[spec]) for spec in structure["specs"]])

    def _constrain_layout(self, leaf, axes: AxisSpec):
        if self.placements.mesh is None:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, self.placements.sharding(axes))

    def _check_result(self, leaf, what: str, axes: AxisSpec):
        """A result of the body still lacks its named axes; the spec describes the whole array."""
        shape = list(jnp.shape(leaf))
        for name, position in sorted(axes.positions, key=lambda placed: placed[1]):
            shape.insert(position, self.sizes[name])
        axes.check(tuple(shape), what)
        self.placements.check_apart(axes.names, what)

    def _by_vmap(self, body, index_0: bool = False):
        return self._over_loops(self.over_axes(body, list(self.sizes), index_0=index_0))

    def over_axes(self, body, names: list, outer=(), index_0: bool = False):
        """One vmap for each of `names`, the first outermost; the axes `outer` are already removed from the arrays."""
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
            # An iteration of a loop sees only a slice of the axis: without the name, a collective over it is an error.
            axis_name=None if placement.loops else name,
            axis_size=self.sizes[name] // placement.iterations,
            spmd_axis_name=self._spmd_axes(placement),
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

    def _spmd_axes(self, placement: Placement) -> tuple[str, ...] | None:
        """The mesh axes of an axis, for XLA's partitioner; None inside a shard_map, which it does not see."""
        if not placement.mesh_axes or is_inside_renamed_mesh():
            return None
        return placed_axes(self.placements.mesh, placement.mesh_axes)

    def _over_loops(self, body):
        loops = dict(loop for name in self.sizes for loop in self.placements[name].loops)
        for loop, length in reversed(loops.items()):
            in_positions = [self._looped_position(axes, loop) for axes in self.inputs]
            out_positions = [self._looped_position(axes, loop) for axes in self.outputs.distinct]
            body = map_in_slices(body, length, in_positions, out_positions)
        return body

    def _looped_position(self, axes: AxisSpec, loop) -> int | None:
        """The position that `loop` slices, if any."""
        result = [position for name, position in axes.positions if loop in dict(self.placements[name].loops)]
        return result[0] if result else None


def map_in_slices(body, length: int, in_positions: list[int | None], out_positions: list[int | None]):
    """Maps `body`, which returns lists of arrays, over `length` slices.

    in_positions: the position that is sliced, for each argument (None: seen whole in every iteration).
    out_positions: the position that the slices of the results make up, for each list (None: the same result in every
    iteration).
    """

    def looped(*leaves):
        sliced = [None if p is None else _slice(leaf, p, length) for leaf, p in zip(leaves, in_positions, strict=True)]

        def iteration(_, slices):
            return None, body(*[leaf if s is None else s for leaf, s in zip(leaves, slices, strict=True)])

        _, by_list = jax.lax.scan(iteration, None, sliced, length=length)
        return [
            [leaf[0] if p is None else _join(leaf, p) for leaf in results]
            for results, p in zip(by_list, out_positions, strict=True)
        ]

    return looped


def _slice(x, position: int, length: int):
    shape = jnp.shape(x)
    x = jnp.reshape(x, (*shape[:position], length, shape[position] // length, *shape[position + 1 :]))
    return jnp.moveaxis(x, position, 0)


def _join(x, position: int):
    x = jnp.moveaxis(x, 0, position)
    return jnp.reshape(x, (*x.shape[:position], x.shape[position] * x.shape[position + 1], *x.shape[position + 2 :]))


LIBRARIES = "jax", "jaxlib", "numpy", "opt_einsum", "shardformer"


def end_in_callers_code(result: types.TracebackType | None) -> types.TracebackType | None:
    """Returns the traceback without the library frames after the last frame of the caller's code.

    The traceback stays complete if it has no such frame, or if jax_traceback_filtering is "off".
    """
    frames: list[types.TracebackType] = []
    entry = result
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    defined = [number for number, entry in enumerate(frames) if not _is_of_a_library(entry.tb_frame)]
    filtering = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]  # jax adds options as attributes
    if not defined or filtering == "off":
        return result
    shortened: types.TracebackType | None = None
    for entry in reversed(frames[: defined[-1] + 1]):
        shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def raised_by_jax(error: Exception) -> bool:
    """Returns True if jax itself raised the error, and not the mapped function."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _library(frames[-1]) == "jax"


def _is_about_taken_axis(message: str, axis: str) -> bool:
    """Returns True for what jax says of a pjit and of a constraint that split a value over an axis of vmap."""
    is_of_constraint = "spmd_axis_name" in message and "cannot appear in with_sharding_constraint" in message
    return f"duplicate entries for `{axis}`" in message or (is_of_constraint and repr(axis) in message)


def _is_about_gradients(error: Exception) -> bool:
    """Returns True if jax cannot differentiate an operation, such as pmax: no other mapping of the body can."""
    return any(words in str(error) for words in ("Differentiation rule", "gradients"))


def _is_of_a_library(frame: types.FrameType) -> bool:
    return _library(frame) in LIBRARIES or frame.f_code.co_filename.startswith("<frozen")


def _library(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
