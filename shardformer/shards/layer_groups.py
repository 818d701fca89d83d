"""A scan over groups of layers, where each layer type needs a separate program, e.g. a kernel with its window."""

from collections.abc import Callable, Sequence

import jax
from jax import Array, lax

from shardformer.shards.parameters import unstack


def scan_groups(
    layer_types: Sequence[Callable], inputs, x: Array, count: int, wrap: Callable | None
) -> tuple[Array, list]:
    """Runs `layer(x, input) -> (x, output)` on each of `count` inputs; returns x and the outputs.

    Layer i is `layer_types[i % len(layer_types)]`. One step of the scan runs a layer of each type; layers that fill no
    group are unrolled after it. `wrap(layer, in_loop=...)` changes the backward pass of a layer.
    """
    size = len(layer_types)
    groups, rest = divmod(count, size)
    layers = [_of_group(layer, i, wrap) for i, layer in enumerate(layer_types)]

    leaves, treedef = jax.tree.flatten(inputs)
    parts = [lax.split(p, (count - rest, rest)) if rest else [p] for p in leaves]
    grouped = [part[0].reshape(groups, size, *part[0].shape[1:]) for part in parts]
    x, outputs = scan_members(layers, jax.tree.unflatten(treedef, grouped), x, groups)
    if not rest:
        return x, outputs
    last = unstack(jax.tree.unflatten(treedef, [part[1] for part in parts]), rest)
    for layer, each in zip(layer_types, last, strict=False):
        x, output = (wrap(layer, in_loop=False) if wrap else layer)(x, each)
        outputs.append(output)
    return x, outputs


def scan_members(members: Sequence[Callable], grouped, x: Array, groups: int) -> tuple[Array, list]:
    """Scans `groups` groups of layers, each member a function of (x, its group's inputs); returns x and the outputs."""

    def run_group(x, of_group):
        outputs = []
        for member in members:
            x, output = member(x, of_group)
            outputs.append(output)
        return x, outputs

    x, by_member = lax.scan(run_group, x, grouped)
    unstacked = [unstack(outputs, groups) for outputs in by_member]
    return x, [each for group in zip(*unstacked, strict=True) for each in group]


def _of_group(layer: Callable, position: int, wrap: Callable | None) -> Callable:
    """Returns the layer as a function of its group's inputs: a scan keeps a second copy of inputs selected before."""

    def run(x, of_group):
        return layer(x, jax.tree.map(lambda p: p[position], of_group))

    return wrap(run, in_loop=True) if wrap else run
