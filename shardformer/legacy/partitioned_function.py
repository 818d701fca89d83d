"""`custom_partitioning` as of jax 0.4.13: callbacks without the mesh, and no rule for Shardy.

Shardy, which propagates layouts today, asks for a rule before it runs, and never calls `infer_sharding_from_operands`.
The rule is found by calling it once for each position of an operand, with only that position split.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import custom_partitioning as today
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_Today = today.custom_partitioning


class custom_partitioning(_Today):
    """A function whose program says how it runs on the parts of its operands."""

    _infers_rule = False

    def def_partition(
        self,
        partition: Callable,
        infer_sharding_from_operands: Callable | None = None,
        propagate_user_sharding: Callable | None = None,
        decode_shardings: bool = True,
        sharding_rule: Any = None,
        **options,
    ) -> Callable:
        statics = len(self.static_argnums)
        self._infers_rule = sharding_rule is None and infer_sharding_from_operands is not None
        super().def_partition(
            _giving_mesh(_accepting_mesh(partition, statics, shapes=2), statics),
            _accepting_mesh(infer_sharding_from_operands, statics, shapes=2),
            _accepting_mesh(propagate_user_sharding, statics, shapes=1),
            decode_shardings,
            sharding_rule,
            **options,
        )
        return partition

    def __call__(self, *args, **kwargs):
        if not self._infers_rule:
            return super().__call__(*args, **kwargs)
        traced: list[tuple] = []

        @functools.wraps(self.fun)
        def fun(*args):
            result = self.fun(*args)
            operands = tuple(arg for position, arg in enumerate(args) if position not in self.static_argnums)
            traced.append((_shapes(operands), _shapes(result)))
            return result

        def rule(*args):
            *statics, mesh, _, _ = args  # the last two are MLIR's types
            infer = functools.partial(self.infer_sharding_from_operands, *statics, mesh)
            return _rule(infer, mesh, *traced[-1])

        with_rule = _Today(fun, self.static_argnums)
        with_rule.def_partition(
            self.partition, self.infer_sharding_from_operands, self.propagate_user_sharding, self.decode_shardings, rule
        )
        return with_rule(*args, **kwargs)


def _accepting_mesh(callback: Any, statics: int, shapes: int) -> Any:
    """Returns a callback, or None, that accepts the mesh between its static arguments and the shapes, as today's do."""
    if callback is None or _accepts(callback, statics + 1 + shapes):
        return callback
    return lambda *args: callback(*args[:statics], *args[statics + 1 :])


def _accepts(callback: Callable, arguments: int) -> bool:
    try:
        inspect.signature(callback).bind(*range(arguments))
    except TypeError:
        return False
    return True


def _giving_mesh(partition: Callable, statics: int) -> Callable:
    """Returns `partition`, which returns the mesh first, as today's do."""

    def call(*args):
        *mesh, lower, results, operands = partition(*args)
        return *(mesh or [args[statics]]), lower, results, operands

    return call


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _rule(infer: Callable, mesh: Mesh, operands: tuple, results: Any) -> today.SdyShardingRule:
    """Returns a rule that names a position of a result as the positions of operands that its layout follows."""
    axis = mesh.axis_names[0]
    leaves, tree = jax.tree.flatten(operands)

    def followers(of_operand: tuple[int, int]) -> list[tuple[int, int]]:
        """Returns the positions of results that `infer` splits if this position of an operand is split."""
        split = [
            _split(leaf, mesh, [axis if (number, position) == of_operand else None for position in range(leaf.ndim)])
            for number, leaf in enumerate(leaves)
        ]
        try:
            layouts = jax.tree.leaves(infer(jax.tree.unflatten(tree, split), results))
        except (AssertionError, NotImplementedError, ValueError):  # it rejects this layout, which may never come
            return []
        return [
            (number, position)
            for number, layout in enumerate(layouts)
            for position, axes in enumerate(getattr(layout, "spec", ()))  # a layout without a mesh tells nothing
            if axis in (axes if isinstance(axes, tuple) else (axes,))
        ]

    names: dict[tuple[int, int], str] = {}  # of the positions of results
    mappings = []
    for number, leaf in enumerate(leaves):
        mapping = []
        for position in range(leaf.ndim):
            split = followers((number, position))
            shared = (names[each] for each in split if each in names)
            name = next((name for name in shared if name not in mapping), f"o{number}p{position}")
            names = dict.fromkeys(split, name) | names
            mapping.append(name)
        mappings.append(today.ArrayMapping(*mapping))
    of_results = [
        today.ArrayMapping(*[names.get((number, position), f"r{number}p{position}") for position in range(leaf.ndim)])
        for number, leaf in enumerate(jax.tree.leaves(results))
    ]
    return today.SdyShardingRule(tuple(mappings), tuple(of_results))


def _split(leaf: jax.ShapeDtypeStruct, mesh: Mesh, axes: list[str | None]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
