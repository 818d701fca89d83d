"""The text of the `jax.shard_map` that does what an xmap did, and of the helpers that it needs."""

import ast
import functools
from collections.abc import Hashable
from typing import Any

from shardformer.legacy.axis_specs import is_spec
from shardformer.legacy.migration.xmap_calls import XmapCall, axis_spec

# Functions that the migrated file gets, each where something uses it. `P` is PartitionSpec's name in that file.
WITHOUT_MAPPED_AXES = '''\
def shard_map_without_mapped_axes(fun, in_specs, out_specs, **options):
    """jax.shard_map of a function that, as under xmap, does not see the positions that the specs name.

    Each device has one index along every such position.
    """

    def positions(spec):
        return tuple(position for position, name in enumerate(spec) if name is not None)

    def squeeze(spec, tree):
        return jax.tree.map(lambda x: jnp.squeeze(x, positions(spec)), tree)

    def expand(spec, tree):
        return jax.tree.map(lambda x: jnp.expand_dims(x, positions(spec)), tree)

    def on_one_device(*args):
        specs = (in_specs,) * len(args) if isinstance(in_specs, P) else in_specs
        args = jax.tree.map(squeeze, specs, args, is_leaf=lambda spec: isinstance(spec, P))
        return jax.tree.map(expand, out_specs, fun(*args), is_leaf=lambda spec: isinstance(spec, P))

    return jax.shard_map(on_one_device, in_specs=in_specs, out_specs=out_specs, **options)
'''
OVER_RENAMED_MESH = '''\
def over_renamed_mesh(names, make):
    """`make(mesh)` for the mesh that jax.set_mesh put in force, with its axes named as the body names them.

    Where none can be seen, as under grad and jit, it is the last one that was in force at a call or where this is made.
    """
    made, found = functools.cache(make), {}

    def look_up():
        with contextlib.suppress(ValueError):
            mesh = jax.sharding.get_mesh()
            if not mesh.empty:
                found["mesh"] = Mesh(mesh.devices, [names.get(axis, axis) for axis in mesh.axis_names])

    def call(*args):
        look_up()
        with jax.sharding.use_abstract_mesh(found["mesh"].abstract_mesh):
            return made(found["mesh"])(*args)

    look_up()
    return call
'''
IMPORTS = {
    "shard_map_without_mapped_axes": ["import jax", "import jax.numpy as jnp"],
    "over_renamed_mesh": ["import contextlib", "import functools", "import jax", "from jax.sharding import Mesh"],
}


def imports_of(helper: str, spec: str) -> list[str]:
    """Returns the imports of a helper; `spec` is the name of PartitionSpec in the file."""
    renamed = "" if spec == "PartitionSpec" else f" as {spec}"
    (lines,) = (lines for name, lines in IMPORTS.items() if helper.startswith(f"def {name}("))
    return [*lines, f"from jax.sharding import PartitionSpec{renamed}"]


def replacement(call: XmapCall, source: str, indent: str, spec: str) -> tuple[str, list[str]]:
    """The expression that takes an xmap's place, its lines after the first one indented, and the helpers it uses.

    spec: the name of PartitionSpec in the file.
    """
    mapped = _vmapped(call, _source(call.fun, source))
    donate = f", donate_argnums={call.donated}" if call.donated else ""
    if not call.mesh_axes:
        return f"jax.jit({mapped}{donate})", []
    renamed = {axis: name for name, axis in call.mesh_axes.items() if axis != name}
    lines = [
        "jax.jit(",
        "    shard_map_without_mapped_axes(",
        f"        {mapped},",
        f"        in_specs={_partition(call.inputs, call, spec)},",
        f"        out_specs={_partition(call.outputs, call, spec)},",
        *(["        mesh=mesh,"] if renamed else []),
        "        check_vma=False,",
        "    ),",
        *([f"    {donate.removeprefix(', ')},"] if donate else []),
        ")",
    ]
    if renamed:
        lines = [f"over_renamed_mesh({_quoted(renamed)}, lambda mesh: {lines[0]}", *lines[1:-1], "))"]
    helper = WITHOUT_MAPPED_AXES.replace(", P)", f", {spec})")
    return f"\n{indent}".join(lines), [helper, *([OVER_RENAMED_MESH] if renamed else [])]


def _vmapped(call: XmapCall, fun: str) -> str:
    """The function under a vmap for each axis without a mesh axis, the first one outermost."""
    removed: list[Hashable] = list(call.mesh_axes)
    layers = []
    for name in call.vmapped:
        place = functools.partial(_position_text, name, tuple(removed))
        size = f", axis_size={call.sizes[name]}" if name in call.sizes else ""
        in_axes, out_axes = _render(call.inputs, place), _render(call.outputs, place)
        layers.append(f"in_axes={in_axes}, out_axes={out_axes}, axis_name={name!r}{size}")
        removed.append(name)
    for layer in reversed(layers):
        fun = f"jax.vmap({fun}, {layer})"
    return fun


def _position_text(name: Hashable, removed: tuple, spec) -> str:
    return repr(axis_spec(spec).position(name, removed))


def _partition(specs: Any, call: XmapCall, name: str) -> str:
    def partition(spec) -> str:
        placed = {position: name for name, position in axis_spec(spec).positions if name in call.mesh_axes}
        parts = [placed.get(position) for position in range(max(placed, default=-1) + 1)]
        return f"{name}({', '.join(map(_quote, parts))})"

    return _render(specs, partition)


def _render(specs: Any, leaf) -> str:
    """The text of a container of specs, with `leaf(spec)` for each."""
    if specs is None:
        return "None"
    if is_spec(specs):
        return leaf(specs)
    if isinstance(specs, dict):
        return "{" + ", ".join(f"{_quote(key)}: {_render(value, leaf)}" for key, value in specs.items()) + "}"
    items = ", ".join(_render(item, leaf) for item in specs)
    return f"[{items}]" if isinstance(specs, list) else f"({items},)" if len(specs) == 1 else f"({items})"


def _source(node: ast.expr, source: str) -> str:
    text = ast.get_source_segment(source, node)
    assert text is not None, "the node is one of this source"
    return f"({text})" if isinstance(node, ast.Lambda) else text


def _quote(value) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _quoted(names: dict[str, Hashable]) -> str:
    return "{" + ", ".join(f"{_quote(key)}: {_quote(value)}" for key, value in names.items()) + "}"
