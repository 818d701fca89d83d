"""`custom_partitioning` as of jax 0.4.13: callbacks without the mesh, and no rule for Shardy.

Shardy, which propagates layouts today, asks for a rule before it runs, and never calls `infer_sharding_from_operands`.
The rule is found by calling it for each position of an operand and each axis of the mesh, with only that split.
"""

import contextlib
import functools
import inspect
import itertools
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
    if callback is None or _requires(callback, statics + 1 + shapes):
        return callback
    return lambda *args: callback(*args[:statics], *args[statics + 1 :])


def _requires(callback: Callable, arguments: int) -> bool:
    """Returns True if a callback needs so many arguments, or accepts any number of them."""
    parameters = inspect.signature(callback).parameters.values()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in by_position and each.default is each.empty]
    return len(required) >= arguments or any(each.kind is each.VAR_POSITIONAL for each in parameters)


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
    leaves = jax.tree.leaves(operands)
    layouts = _layouts_of_results(infer, mesh, operands, results)

    def followers(of_operand: tuple[int, int]) -> list[tuple[int, int]]:
        """Returns the positions of results that `infer` splits, over any axis, if this position of an operand is."""
        return [
            (number, position)
            for axis in mesh.axis_names
            for number, layout in enumerate(layouts.get((of_operand, axis), ()))
            for position, axes in enumerate(getattr(layout, "spec", ()))  # a layout without a mesh tells nothing
            if axis in (axes if isinstance(axes, tuple) else (axes,))
        ]

    result_leaves = jax.tree.leaves(results)
    names: list[dict[int, str]] = [{} for _ in result_leaves]  # of the positions of each
    mappings = []
    for number, leaf in enumerate(leaves):
        mapping: list[str] = []
        for position in range(leaf.ndim):
            split = followers((number, position))
            shared = (names[result][at] for result, at in split if at in names[result])
            name = next((name for name in shared if name not in mapping), f"o{number}p{position}")
            for result, at in split:
                if at not in names[result] and name not in names[result].values():  # other axes may split another
                    names[result][at] = name
            mapping.append(name)
        mappings.append(today.ArrayMapping(*mapping))
    of_results = [
        today.ArrayMapping(*[names[number].get(position, f"r{number}p{position}") for position in range(leaf.ndim)])
        for number, leaf in enumerate(result_leaves)
    ]
    return today.SdyShardingRule(tuple(mappings), tuple(of_results))


def _layouts_of_results(infer: Callable, mesh: Mesh, operands: tuple, results: Any) -> dict[Any, list]:
    """Returns what `infer` answers to each pair of a position of an operand and the axis that splits it.

    An error at all of them, and where nothing is split, is a mistake of `infer`, and raised.
    """
    leaves, tree = jax.tree.flatten(operands)
    positions = [(number, position) for number, leaf in enumerate(leaves) for position in range(leaf.ndim)]
    results_tree: Any = jax.tree.structure(results)  # mypy finds no methods of jax's type

    def infer_split(of_operand: tuple[int, int] | None, axis: str | None) -> list:
        """Returns the layouts of results if `axis` splits this position of an operand, and nothing another."""
        split = [
            _split(leaf, mesh, [axis if (number, position) == of_operand else None for position in range(leaf.ndim)])
            for number, leaf in enumerate(leaves)
        ]
        return results_tree.flatten_up_to(infer(jax.tree.unflatten(tree, split), results))

    layouts = {}
    for of_operand, axis in itertools.product(positions, mesh.axis_names):
        with contextlib.suppress(AssertionError, NotImplementedError, ValueError):  # a layout that may never come
            layouts[of_operand, axis] = infer_split(of_operand, axis)
    if not layouts:
        infer_split(None, None)
    return layouts


def _split(leaf: jax.ShapeDtypeStruct, mesh: Mesh, axes: list[str | None]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
