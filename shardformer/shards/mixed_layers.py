"""Layers of which some have experts and others a dense feed-forward.

Each parameter is stacked over the layers that have it. A layer without the router's parameters is dense.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config import Config
from shardformer.layout.choose_layers import Loop
from shardformer.parallel.replicas import map_named
from shardformer.shards.layer_groups import scan_members
from shardformer.shards.parameters import unstack


class MixedLayers:
    """The layers of a stage (all, without stages), whose parameters have leading axes of different lengths."""

    def __init__(self, config: Config):
        self._config, self._count = config, config.stage_layers

    def init(self, sparse: Callable, dense: Callable, keys: Array) -> dict:
        """Returns the stacked parameters of layers with these keys, drawn by the functions of a layer of each kind."""

        @functools.cache  # one trace for all parameters of the same layers
        def draw_layers(layers: tuple[int, ...]) -> dict:
            """Draws the parameters of layers of one kind; the compiler removes those that are not used."""
            function = sparse if self._config.mixture.sparse_layers[layers[0]] else dense
            return jax.vmap(function)(keys[jnp.array(layers)])

        def draw(name: str) -> Array:
            """Draws one parameter in all layers that have it."""
            module, _, leaf = name.rpartition("/")
            return draw_layers(tuple(self._config.mixture.layers_of(name)))[module][leaf]

        shapes = [jax.eval_shape(function, keys[0]) for function in (sparse, dense)]
        names = {module: {**shapes[0][module], **shapes[1][module]} for module in shapes[0]}
        return map_named(lambda name, _: draw(name), names)

    def unstack(self, inputs: tuple, count: int) -> list[tuple]:
        """Returns the inputs (parameters, *others) of each of `count` layers."""
        stored, *others = inputs
        columns = map_named(lambda name, leaf: unstack(leaf, self._rows_before(name, count)), stored)
        rows = unstack(tuple(others), count)
        return [(self._select(columns, 0, i), *row) for i, row in enumerate(rows)]

    def run(
        self, layers: Sequence[Callable], inputs: tuple, x: Array, count: int, loop: Loop, wrap: Callable | None = None
    ) -> tuple[Array, list]:
        """Runs `layer(x, input) -> (x, output)` on each of `count` inputs; returns x and the outputs.

        Layer i is `layers[i % len(layers)]`. A scan runs the groups of `loop`; layers before and after are unrolled.
        """
        groups = (count - loop.first) // loop.period
        if not loop.scan or groups < 2:
            return self._run_unrolled(layers, self.unstack(inputs, count), x, 0, wrap)
        start, stop = loop.first, loop.first + groups * loop.period
        before, grouped, after = self._split(inputs, start, stop)
        x, outputs = self._run_unrolled(layers, self._unstack_part(before, 0, start), x, 0, wrap)
        x, of_groups = self._scan(layers, grouped, x, start, groups, loop.period, wrap)
        x, last = self._run_unrolled(layers, self._unstack_part(after, stop, count), x, stop, wrap)
        return x, [*outputs, *of_groups, *last]

    def _run_unrolled(self, layers, inputs: list[tuple], x, first: int, wrap):
        outputs: list = []
        for i, each in enumerate(inputs, first):
            layer = layers[i % len(layers)]
            x, output = (wrap(layer, in_loop=False) if wrap else layer)(x, each)
            outputs.append(output)
        return x, outputs

    def _scan(self, layers, inputs: tuple, x, first: int, groups: int, period: int, wrap):
        def of_group(position: int) -> Callable:
            def run(x, inputs):  # selects inside of `wrap`: a scan keeps a second copy of inputs selected before
                stored, index = inputs
                selected = self._select(stored, first, first + position), index[position]
                return layers[(first + position) % len(layers)](x, selected)

            return wrap(run, in_loop=True) if wrap else run

        members = [of_group(position) for position in range(period)]
        grouped = jax.tree.map(lambda p: p.reshape(groups, -1, *p.shape[1:]), inputs)
        return scan_members(members, grouped, x, groups)

    def _rows_before(self, name: str, layer: int) -> int:
        """Returns the number of layers before this one that have a parameter."""
        return bisect.bisect_left(self._config.mixture.layers_of(name), layer)

    def _select(self, stored: dict, first: int, layer: int) -> dict:
        """Returns the parameters of a layer; `stored` has those of the layers `first`, `first + 1`..."""
        selected: dict = {}
        for module, leaves in stored.items():
            selected[module] = {
                name: leaf[self._rows_before(name, layer) - self._rows_before(name, first)]
                for name, leaf in leaves.items()
                if layer in self._config.mixture.layers_of(name)
            }
        return selected

    def _split(self, inputs: tuple, start: int, stop: int) -> list[tuple]:
        """Returns the inputs of the layers before `start`, up to `stop`, and after; a part without rows is left out."""
        stored, index = inputs
        parts: list[dict] = [{module: {} for module in stored} for _ in range(3)]
        for module, leaves in stored.items():
            for name, leaf in leaves.items():
                bounds = [0, self._rows_before(name, start), self._rows_before(name, stop), leaf.shape[0]]
                sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
                pieces = iter(lax.split(leaf, [size for size in sizes if size]) if max(sizes) < sum(sizes) else [leaf])
                for part, size in zip(parts, sizes, strict=True):
                    if size:
                        part[module][name] = next(pieces)
        indices = index[:start], index[start:stop], index[stop:]
        return list(zip(parts, indices, strict=True))

    def _unstack_part(self, inputs: tuple, start: int, stop: int) -> list[tuple]:
        """Returns the inputs of each of the layers `start` to `stop`."""
        stored, index = inputs
        columns = map_named(lambda name, leaf: unstack(leaf, leaf.shape[0]), stored)
        return [(self._select(columns, start, i), index[i - start]) for i in range(start, stop)]
