"""The loop over layers: scanned, unrolled, or scanned in groups if the layers are of several kinds."""

from collections.abc import Callable, Sequence

import jax
from jax import Array, lax


def run_layers(
    kinds: Sequence[Callable], inputs, x: Array, count: int, scan: bool, wrap: Callable = lambda layer, in_loop: layer
) -> tuple[Array, list]:
    """Runs `layer(x, input) -> (x, output)` on each of `count` inputs; returns x and the outputs.

    Layer i is `kinds[i % len(kinds)]`. One step of the scan runs a layer of each kind; layers that fill no group are
    unrolled after it. `wrap(layer, in_loop=...)` changes the backward pass of a layer, as `jax.checkpoint` does.
    """
    if scan and len(kinds) > 1:
        return _scan_groups(kinds, inputs, x, count, wrap)
    wrapped = [wrap(kind, in_loop=scan) for kind in kinds]
    if not scan:
        return _run_in_order(wrapped, unstack(inputs, count), x)
    x, outputs = lax.scan(wrapped[0], x, inputs)
    return x, unstack(outputs, count)


def _run_in_order(kinds: Sequence[Callable], inputs: list, x) -> tuple[Array, list]:
    outputs: list = []
    for i, each in enumerate(inputs):
        x, output = kinds[i % len(kinds)](x, each)
        outputs.append(output)
    return x, outputs


def _scan_groups(kinds, inputs, x, count: int, wrap) -> tuple[Array, list]:
    size = len(kinds)
    groups, others = divmod(count, size)

    def take(place: int) -> Callable:
        """Returns the layer as a function of its group's inputs: a scan keeps a second copy of what is taken before."""

        def of_its_group(x, of_group):
            return kinds[place](x, jax.tree.map(lambda p: p[place], of_group))

        return wrap(of_its_group, in_loop=True)

    layers = [take(place) for place in range(size)]

    def run_group(x, of_group):
        outputs = []
        for layer in layers:
            x, output = layer(x, of_group)
            outputs.append(output)
        return x, outputs

    leaves, treedef = jax.tree.flatten(inputs)
    parts = [lax.split(p, (count - others, others)) if others else [p] for p in leaves]
    grouped = [part[0].reshape(groups, size, *part[0].shape[1:]) for part in parts]
    x, by_kind = lax.scan(run_group, x, jax.tree.unflatten(treedef, grouped))
    outputs = [each for group in zip(*[unstack(kind, groups) for kind in by_kind], strict=True) for each in group]
    last = unstack(jax.tree.unflatten(treedef, [part[1] for part in parts]), others) if others else []
    x, more = _run_in_order([wrap(kind, in_loop=False) for kind in kinds[:others]], last, x)
    return x, outputs + more


def unstack(tree, count: int) -> list:
    """Splits the leading axis of each leaf; a leaf may be a list already. Returns a list of trees.

    lax.split joins the gradients by one concatenation.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_list)
    columns = [x if _is_list(x) else [part[0] for part in lax.split(x, (1,) * count)] for x in leaves]
    return [jax.tree.unflatten(treedef, [column[i] for column in columns]) for i in range(count)]


def _is_list(leaf) -> bool:
    return isinstance(leaf, list)
