"""`xmap`, with the meaning that `jax.experimental.maps.xmap` had."""

import functools
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shardformer.legacy import processes, settings
from shardformer.legacy.axis_specs import Specs
from shardformer.legacy.mesh_in_scope import current_mesh, thread_resources
from shardformer.legacy.mapped_program import Program
from shardformer.legacy.axis_resources import Placements, check_resources, check_sizes, place


def xmap(
    fun: Callable,
    in_axes: Any,
    out_axes: Any,
    *,
    axis_sizes: Mapping[Hashable, int] | None = None,
    axis_resources: Mapping[Hashable, Any] | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    backend: str | None = None,
    strict: bool | None = None,
) -> Callable:
    """Maps `fun` over named axes; shardformer/legacy/README.md says what each part means.

    in_axes, out_axes: a pytree prefix of specs: `["i", ...]`, `["i", None, "j"]` or `{0: "i", 2: "j"}`.
    axis_sizes: sizes of axes that no argument carries.
    axis_resources: the mesh axes (or SerialLoops) that a named axis is spread over. They never change a value.
    donate_argnums: arguments whose arrays may become the results' memory; they are deleted.
    backend: accepted for old callers; the mesh, or jax's default device, says where to run.
    strict: raise where a result varies over an axis that its spec omits, rather than return its value at index 0.
    """
    mapped = _Mapped(
        fun,
        in_axes,
        out_axes,
        {} if axis_sizes is None else axis_sizes,
        {} if axis_resources is None else axis_resources,
        donate_argnums,
        strict,
    )

    @functools.wraps(fun, updated=())
    def call(*args, **named):
        if named:
            raise TypeError(
                f"an xmapped function takes no keyword arguments, got {_listed(named)}; pass them by position, where "
                "in_axes has a spec for each"
            )
        return mapped.call(*args)

    call.lower = mapped.lower
    return call


# Legacy code writes `xmap(f, ...)(x)` inside of loops: the same f and specs find what was compiled before.
_known = weakref.WeakKeyDictionary()


class _Mapped:
    """One xmapped function, and its compiled program for every structure, shape and mesh it was called with."""

    def __init__(self, fun, in_axes, out_axes, axis_sizes, axis_resources, donate_argnums, strict):
        if not callable(fun):
            raise TypeError(f"xmap got {fun!r} as its function, which cannot be called")
        if isinstance(out_axes, tuple) and not out_axes:
            raise ValueError("out_axes is (): an xmapped function returns at least one value; [...] maps nothing")
        check_resources(axis_resources)
        check_sizes(axis_sizes)
        try:
            self.known_as, programs = _known.setdefault(fun, (weakref.ref(fun), {}))
        except TypeError as error:
            raise TypeError(f"xmap cannot look {fun!r} up again ({error}); wrap it in a def or a lambda") from None
        self.fun = self.known_as()  # the equal one that the programs know: bound methods are made anew at every mention
        self.inputs, self.outputs = Specs(in_axes, "in_axes"), Specs(out_axes, "out_axes")
        self.axis_sizes, self.axis_resources = dict(axis_sizes), dict(axis_resources)
        self.names = tuple(dict.fromkeys([*self.inputs.names, *axis_sizes]))
        self.donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        if not all(isinstance(number, int) for number in self.donated):
            raise TypeError(f"donate_argnums is {donate_argnums!r}; it is an argument's number, or a tuple of them")
        self.strict = strict
        self.compiled = programs.setdefault(self._key(), {})
        for what, names in (("out_axes", self.outputs.names), ("axis_resources", axis_resources)):
            if unknown := [name for name in names if name not in self.names]:
                raise ValueError(
                    f"{what} has {_listed(unknown)}, which nothing defines; an axis comes from in_axes or axis_sizes, "
                    f"and those have {_listed(self.names) or 'none'}"
                )

    def _key(self):
        """What tells xmaps of the same function apart."""
        sizes, resources = tuple(self.axis_sizes.items()), tuple(self.axis_resources.items())
        return self.inputs.key, self.outputs.key, sizes, resources, self.donated, self.strict

    def call(self, *args):
        placements = place(self.names, self.axis_resources)
        whole = self._whole(args, placements)
        result = self._run(whole, placements)
        return result if whole is args else processes.part(result)

    def lower(self, *args):
        placements = place(self.names, self.axis_resources)
        args = self._whole(args, placements)
        return self._compiled(args, placements).jitted.lower(*args)

    def _whole(self, args, placements):
        if not processes.passes_parts(placements.mesh, args):
            return args
        return processes.whole(args, [axes for _, axes in self.inputs.match(args)], placements)

    def _run(self, args, placements):
        compiled = self._compiled(args, placements)
        moved = args if compiled.shardings is None else jax.tree.map(_moved, args, compiled.shardings)
        result = compiled.jitted(*moved)
        while compiled.warnings:
            warnings.warn(compiled.warnings.pop(), stacklevel=4)
        for argument in self._donated(args):
            jax.tree.map(_delete, args[argument], moved[argument])
        return result

    def _compiled(self, args, placements: Placements) -> "_Compiled":
        """The program for these arguments."""
        leaves, tree = jax.tree.flatten(args)
        strict = settings.strict if self.strict is None else self.strict
        # An xmap within the body looks up the mesh and the loops as well.
        around = current_mesh(), thread_resources.env.loops
        key = (tree, tuple(map(np.shape, leaves)), placements, strict, around)
        if key not in self.compiled:
            self.compiled[key] = self._compile(args, placements, strict)
        return self.compiled[key]

    def _compile(self, args, placements: Placements, strict: bool):
        leaves, tree = jax.tree.flatten(args)
        matched = self.inputs.match(args)
        for leaf, (path, axes) in zip(leaves, matched, strict=True):
            axes.check(np.shape(leaf), f"argument {path}")
            placements.check_apart(axes.names, f"argument {path}")
        sizes = _sizes(leaves, matched, self.names, self.axis_sizes)
        _check_divisible(sizes, placements)
        inputs = tuple(axes for _, axes in matched)
        program = Program(self.known_as, tree, inputs, self.outputs, sizes, placements, strict)

        def xmapped(*args):
            return program(*args)

        xmapped.__name__ = xmapped.__qualname__ = program.name  # for messages and profiles
        donated, told = self._donated(args), program.warnings
        if placements.mesh is None:
            return _Compiled(jax.jit(xmapped, donate_argnums=donated), None, told)
        shardings = jax.tree.unflatten(tree, [placements.sharding(axes) for axes in inputs])
        return _Compiled(jax.jit(xmapped, in_shardings=shardings, donate_argnums=donated), shardings, told)

    def _donated(self, args) -> tuple[int, ...]:
        return tuple(argument for argument in self.donated if -len(args) <= argument < len(args))


class _Compiled(NamedTuple):
    jitted: Callable
    shardings: Any  # of the arguments; None without a mesh
    warnings: list[str]  # to be told to the caller, once the program was traced


def _sizes(leaves, matched, names, axis_sizes) -> dict[Hashable, int]:
    """The size of every axis, in the order of `names`, each agreed upon by all that mention it."""
    said = {name: (size, "axis_sizes") for name, size in axis_sizes.items()}
    for leaf, (path, axes) in zip(leaves, matched, strict=True):
        for name, position in axes.positions:
            size = np.shape(leaf)[position]
            before, who = said.setdefault(name, (size, f"argument {path}"))
            if size != before:
                raise ValueError(
                    f"the axis {name!r} has size {before} in {who}, but size {size} in argument {path} "
                    f"(spec {axes.text}, shape {np.shape(leaf)}, position {position}); give both the same size"
                )
    if unknown := [name for name in names if name not in said]:
        raise ValueError(
            f"the size of {_listed(unknown)} is unknown: no array was passed where in_axes has it; say it in axis_sizes"
        )
    return {name: said[name][0] for name in names}


def _check_divisible(sizes, placements):
    for name, size in sizes.items():
        placement = placements[name]
        parts = placements.devices(name) * placement.turns
        if size % parts:
            over = [*placement.mesh_axes, *(f"a loop of {length}" for _, length in placement.loops)]
            raise ValueError(
                f"the axis {name!r} has size {size}, which is not divisible by the {parts} parts that axis_resources "
                f"asks for ({_listed(over)}); change its size, the mesh, or its resources"
                + processes.hint(placements.mesh)
            )


def _moved(leaf, sharding):
    if isinstance(leaf, jax.core.Tracer) or getattr(leaf, "sharding", None) == sharding:
        return leaf
    return jax.device_put(leaf, sharding)


def _delete(given, moved):
    """Donation on the CPU may leave an array alone; legacy code can rely on its end. A copy was donated instead of
    an array that had to be moved."""
    if moved is given and isinstance(given, jax.Array) and not isinstance(given, jax.core.Tracer):
        given.delete()


def _listed(names) -> str:
    return ", ".join(map(repr, names))
