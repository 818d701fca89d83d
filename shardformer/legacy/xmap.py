"""`xmap`, with the meaning that `jax.experimental.maps.xmap` had."""

import functools
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shardformer.legacy import install_options, process_local_arrays
from shardformer.legacy.axis_resources import Placements, check_resources, check_sizes, names_in_scope, place, scope_key
from shardformer.legacy.axis_specs import SpecTree
from shardformer.legacy.mapped_program import MappedProgram, end_in_callers_code
from shardformer.legacy.relocation import anchor, gather_on_one_device, lie_apart, relocate


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

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shardformer import xmap
    >>> share = xmap(lambda x: x / jax.lax.psum(x, "rows"), in_axes=["rows", ...], out_axes=["rows", ...])
    >>> share(jnp.array([1.0, 3.0])).tolist()
    [0.25, 0.75]

    Arguments:
      in_axes, out_axes: a pytree prefix of specs: `["i", ...]`, `["i", None, "j"]` or `{0: "i", 2: "j"}`.
      axis_sizes: sizes of axes that no argument carries.
      axis_resources: the mesh axes (or SerialLoops) that a named axis is spread over. They never change a value.
      donate_argnums: arguments whose arrays may become the results' memory; they are deleted.
      backend: accepted for old callers; the mesh, or jax's default device, says where to run.
      strict: raise where a result varies over an axis that its spec omits, rather than return its value at index 0.
    """
    mapped = _MappedFunction(
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

    call.lower = mapped.lower  # type: ignore[attr-defined]  # functions take attributes
    return call


# Legacy code writes `xmap(f, ...)(x)` inside loops: the same f and specs find what was compiled before.
_programs_by_function: weakref.WeakKeyDictionary[Callable, tuple] = weakref.WeakKeyDictionary()


class _MappedFunction:
    """One xmapped function, and its compiled program for every structure, shape and mesh it was called with."""

    def __init__(self, fun, in_axes, out_axes, axis_sizes, axis_resources, donate_argnums, strict):
        if not callable(fun):
            raise TypeError(f"xmap got {fun!r} as its function, which cannot be called")
        if isinstance(out_axes, tuple) and not out_axes:
            raise ValueError("out_axes is (): an xmapped function returns at least one value; [...] maps nothing")
        check_resources(axis_resources)
        check_sizes(axis_sizes)
        try:
            self.fun_reference, programs = _programs_by_function.setdefault(fun, (weakref.ref(fun), {}))
        except TypeError as error:
            raise TypeError(f"xmap cannot look {fun!r} up again ({error}); wrap it in a def or a lambda") from None
        self.fun = self.fun_reference()  # each mention of a bound method is another object: this one owns the programs
        self.inputs, self.outputs = SpecTree(in_axes, "in_axes"), SpecTree(out_axes, "out_axes")
        self.names = tuple(dict.fromkeys([*self.inputs.names, *axis_sizes]))
        self.axis_sizes = dict(axis_sizes)
        self.axis_resources = self._known_resources(axis_resources, strict)
        if unknown := [name for name in self.outputs.names if name not in self.names]:
            raise ValueError(self._undefined("out_axes", unknown))
        self.donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        if not all(isinstance(number, int) for number in self.donated):
            raise TypeError(f"donate_argnums is {donate_argnums!r}; it is an argument's number, or a tuple of them")
        self.strict = strict
        self.recent: _RecentCall | None = None
        self.scopes: dict[tuple, _Scope] = programs.setdefault(self._key(), {})

    def _known_resources(self, axis_resources: Mapping, strict: bool | None) -> dict:
        """Without those of axes that nothing defines: the oldest releases ignored them, and code relies on it."""
        unknown = [name for name in axis_resources if name not in self.names]
        if unknown and (install_options.strict if strict is None else strict):
            raise ValueError(self._undefined("axis_resources", unknown))
        if unknown:
            _warn_once(f"{self._undefined('axis_resources', unknown)}. Ignored here; strict=True makes this an error")
        return {name: resources for name, resources in axis_resources.items() if name in self.names}

    def _undefined(self, what: str, unknown: list) -> str:
        return (
            f"{what} has {_listed(unknown)}, which nothing defines; an axis comes from in_axes or axis_sizes, "
            f"and those have {_listed(self.names) or 'none'}"
        )

    def _key(self) -> tuple:
        """Returns the hashable identity of this xmap among the xmaps of one function."""
        sizes, resources = tuple(self.axis_sizes.items()), tuple(self.axis_resources.items())
        return self.inputs.key, self.outputs.key, sizes, resources, self.donated, self.strict

    def call(self, *args):
        try:
            return self._call(*args)
        except Exception as error:
            if not names_in_scope():  # otherwise an xmap around this one may still find another way
                error.__traceback__ = end_in_callers_code(error.__traceback__)
            raise

    def _call(self, *args):
        leaves, tree = jax.tree.flatten(args)
        recent, self.recent = self.recent, None
        if recent is not None and recent.is_like(leaves, tree):
            result = recent.program.jitted(*args)
            _warn_of(recent.program, stacklevel=5)
            self.recent = recent
            return result
        scope = self._current_scope()
        if not process_local_arrays.needs_local_shards(scope.placements.mesh, args):
            return self._run(args, leaves, tree, scope)
        args = self._to_global(args, scope.placements)
        return process_local_arrays.to_local(self._run(args, *jax.tree.flatten(args), scope))

    def lower(self, *args):
        scope = self._current_scope()
        if process_local_arrays.needs_local_shards(scope.placements.mesh, args):
            args = self._to_global(args, scope.placements)
        return self._compiled(args, *jax.tree.flatten(args), scope).jitted.lower(*args)

    def _to_global(self, args, placements: Placements):
        return process_local_arrays.to_global(args, [axes for _, axes in self.inputs.match(args)], placements)

    def _current_scope(self) -> "_Scope":
        """The mesh and the loops of this moment, which an xmap within the body looks up as well."""
        strict = install_options.strict if self.strict is None else self.strict
        key = (*scope_key(), strict)
        scope = self.scopes.get(key)
        if scope is None:
            scope = self.scopes[key] = _Scope(place(self.names, self.axis_resources), strict, {})
        return scope

    def _run(self, args, leaves: list, tree, scope: "_Scope"):
        compiled = self._compiled(args, leaves, tree, scope)
        in_place = self._in_place(leaves, compiled)
        moved = args if in_place is leaves else jax.tree.unflatten(tree, in_place)
        try:
            result = compiled.jitted(*moved)
        except Exception as error:
            if not _is_about_devices(error):
                raise
            result = self._run_where_all_can_meet(args, compiled, error)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            result = jax.tree.map(anchor, result)
        _warn_of(compiled, stacklevel=6)
        if self.donated:
            self._delete_donated(args, moved)
        elif in_place is leaves and not process_local_arrays.spans_processes(scope.placements.mesh):
            self.recent = _RecentCall.remember(leaves, tree, compiled)
        return result

    def _in_place(self, leaves: list, compiled: "_Compiled") -> list:
        """The arrays where the program wants them; `leaves` itself if all of them are there."""
        if compiled.shardings is None:
            return gather_on_one_device(leaves) if len(leaves) > 1 and lie_apart(leaves) else leaves
        result = [getattr(leaf, "sharding", None) for leaf in leaves]
        if result == compiled.accepted:  # fast: lists compare identical objects without asking them
            return leaves
        moved = [
            leaf if has is right else relocate(leaf, wanted)
            for leaf, has, right, wanted in zip(leaves, result, compiled.accepted, compiled.shardings, strict=True)
        ]
        compiled.accepted[:] = [
            has if new is leaf else wanted
            for leaf, new, has, wanted in zip(leaves, moved, result, compiled.shardings, strict=True)
        ]
        return moved

    def _run_where_all_can_meet(self, args, compiled: "_Compiled", error: Exception):
        """Without a mesh, under a transform: only jax knows where the arrays are that a tracer stands for."""
        leaves, tree = jax.tree.flatten(args)
        if compiled.shardings is None and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return compiled.jitted(*jax.tree.unflatten(tree, gather_on_one_device(leaves)))
        raise ValueError(
            f"xmap of {self._name()}: an argument or a value that the body closes over was committed to other devices "
            f"than the rest ({_where(args)}). Pass traced values that the body closes over as arguments, with the "
            "spec [...]; arguments are moved to where the mesh wants them"
        ) from error

    def _name(self) -> str:
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def _compiled(self, args, leaves: list, tree, scope: "_Scope") -> "_Compiled":
        """The program for these arguments."""
        try:
            shapes = tuple([leaf.shape for leaf in leaves])
        except AttributeError:  # Python numbers
            shapes = tuple(map(np.shape, leaves))
        transformed = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        key = tree, shapes, transformed
        compiled = scope.programs.get(key)
        if compiled is None:
            compiled = scope.programs[key] = self._compile(args, leaves, tree, scope, transformed)
        return compiled

    def _compile(self, args, leaves: list, tree, scope: "_Scope", transformed: bool) -> "_Compiled":
        placements = scope.placements
        matched = self.inputs.match(args)
        for leaf, (path, axes) in zip(leaves, matched, strict=True):
            axes.check(np.shape(leaf), f"argument {path}")
            placements.check_apart(axes.names, f"argument {path}")
        sizes = _sizes(leaves, matched, self.names, self.axis_sizes)
        _check_divisible(sizes, placements)
        inputs = tuple(axes for _, axes in matched)
        program = MappedProgram(
            self.fun_reference, tree, inputs, self.outputs, sizes, placements, scope.strict, transformed
        )

        def xmapped(*args):
            return program(*args)

        xmapped.__name__ = xmapped.__qualname__ = program.name  # for messages and profiles
        donated = tuple(argument for argument in self.donated if -len(args) <= argument < len(args))
        if placements.mesh is None:
            return _Compiled(jax.jit(xmapped, donate_argnums=donated), None, [], program.warnings)
        shardings = [placements.sharding(axes) for axes in inputs]
        jitted = jax.jit(xmapped, in_shardings=jax.tree.unflatten(tree, shardings), donate_argnums=donated)
        return _Compiled(jitted, shardings, list(shardings), program.warnings)

    def _delete_donated(self, args, moved):
        """Donation on the CPU may leave an array alone; legacy code can rely on its end. Of an array that had to be
        moved, the copy was donated."""
        for argument in self.donated:
            if -len(args) <= argument < len(args):
                jax.tree.map(_delete, args[argument], moved[argument])


class _Scope(NamedTuple):
    """The resources of each axis around a call, and the programs compiled for them."""

    placements: Placements
    strict: bool
    programs: dict[tuple, "_Compiled"]


class _Compiled(NamedTuple):
    jitted: Callable
    shardings: list | None  # of the arguments' leaves; None without a mesh
    accepted: list  # equal ones, as the objects that the arguments of the last call had
    warnings: list[str]  # for the caller, once the program was traced


class _RecentCall(NamedTuple):
    """The signature of the last call. An equal call runs its program without asking which program that is."""

    program: _Compiled
    tree: Any
    types: list
    shapes: list
    shardings: list
    scope: tuple
    strict: bool

    @classmethod
    def remember(cls, leaves: list, tree, program: _Compiled) -> "_RecentCall | None":
        """Returns None for calls under a transform, and for arguments without a shape."""
        if not all(
            isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer) for leaf in leaves
        ):
            return None
        shapes, shardings = [leaf.shape for leaf in leaves], [getattr(leaf, "sharding", None) for leaf in leaves]
        return cls(program, tree, list(map(type, leaves)), shapes, shardings, scope_key(), install_options.strict)

    def is_like(self, leaves: list, tree) -> bool:
        return (
            list(map(type, leaves)) == self.types
            and [leaf.shape for leaf in leaves] == self.shapes
            and [getattr(leaf, "sharding", None) for leaf in leaves] == self.shardings
            and tree == self.tree
            and scope_key() == self.scope
            and install_options.strict == self.strict
        )


def _sizes(leaves, matched, names, axis_sizes) -> dict[Hashable, int]:
    """The size of every axis, in the order of `names`, each agreed upon by all that mention it."""
    result = {name: (size, "axis_sizes") for name, size in axis_sizes.items()}
    for leaf, (path, axes) in zip(leaves, matched, strict=True):
        for name, position in axes.positions:
            size = np.shape(leaf)[position]
            before, who = result.setdefault(name, (size, f"argument {path}"))
            if size != before:
                raise ValueError(
                    f"the axis {name!r} has size {before} in {who}, but size {size} in argument {path} "
                    f"(spec {axes.text}, shape {np.shape(leaf)}, position {position}); give both the same size"
                )
    for name in names:
        if name not in result:
            raise ValueError(f"the size of {name!r} is unknown: no argument carries it; give it in axis_sizes")
    return {name: result[name][0] for name in names}


def _check_divisible(sizes: dict[Hashable, int], placements: Placements):
    for name, size in sizes.items():
        placement = placements[name]
        parts = placements.devices(name) * placement.iterations
        if size % parts:
            over = [*placement.mesh_axes, *(f"a loop of {length}" for _, length in placement.loops)]
            raise ValueError(
                f"the axis {name!r} has size {size}, which is not divisible by the {parts} parts that axis_resources "
                f"asks for ({_listed(over)}); change its size, the mesh, or its resources"
                + process_local_arrays.hint(placements.mesh)
            )


@functools.cache
def _warn_once(message: str):
    warnings.warn(message, stacklevel=5)


def _warn_of(program: _Compiled, stacklevel: int):
    """Warns in the line that called the xmapped function."""
    while program.warnings:
        warnings.warn(program.warnings.pop(), stacklevel=stacklevel)


def _is_about_devices(error: Exception) -> bool:
    """Returns True if jax found that the arrays of one program lie on different devices."""
    errors = [error, error.__context__]
    return any("DeviceAssignmentMismatch" in type(e).__name__ or "incompatible devices" in str(e) for e in errors)


def _where(args) -> str:
    """Describes the layout of each argument, for a message."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(args)
    lie = [
        f"argument {jax.tree_util.keystr(path)} is {'traced' if isinstance(leaf, jax.core.Tracer) else leaf.sharding}"
        for path, leaf in leaves
        if isinstance(leaf, jax.Array)
    ]
    return ", ".join(lie[:8]) + (", ..." if len(lie) > 8 else "")


def _delete(given, moved):
    if moved is given and isinstance(given, jax.Array) and not isinstance(given, jax.core.Tracer):
        given.delete()


def _listed(names) -> str:
    return ", ".join(map(repr, names))
