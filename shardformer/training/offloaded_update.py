"""`offload=optimizer`: the optimizer's state in the host's memory between steps. Global view.

The moments of matrices, and the masters of `param_dtype=bfloat16`, are arrays of the memory kind `pinned_host`, which
every platform has: on a CPU it is the one memory. The update copies the state of one layer to the device, updates the
layer there, and copies the new state back, in a loop: the device never has the state of two layers. Parameters outside
of the layers are updated together. optax computes with arrays of one memory only.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from shardformer.config.names import HOST, is_stacked
from shardformer.model import Loss, master_weights
from shardformer.training.step import StepMetrics, TrainState, Update, add_if_finite

_HOST_SPACE, _DEVICE_SPACE = jax.memory.Space.Host, jax.memory.Space.Device


class Streamed(NamedTuple):
    """The arrays that an update changes: of all trainable parameters, or of a part of them."""

    params: Any
    optimizer: Any
    masters: Any


class OffloadedUpdate(Update):
    """The update of a training state whose optimizer has its arrays in the host's memory."""

    def make_shardings(self) -> TrainState:
        """Returns the NamedSharding of every array of the state, with its kind of memory."""
        shardings, shapes = super().make_shardings(), jax.eval_shape(self.start, self.model.shapes)

        def place(path, sharding, leaf):
            return sharding.with_memory_kind(HOST) if is_offloaded(path, leaf) else sharding

        fields = ("optimizer", "masters")
        placed = {name: tree_util.tree_map_with_path(place, getattr(shardings, name), getattr(shapes, name))
                  for name in fields}  # fmt: skip
        return shardings._replace(**placed)

    def start(self, params) -> TrainState:
        """Returns the state before the first step, from float32 parameters."""
        state = super().start(params)
        # A result that is an argument would stay in the device's memory.
        return state._replace(masters=jax.tree.map(lambda leaf: jax.device_put(leaf, _HOST_SPACE), state.masters))

    def apply(self, state: TrainState, losses: Loss, grads, batch_step, **arguments) -> tuple[TrainState, tuple]:
        """Returns the state after an update by mean gradients, and the step's metrics.

        A bad step writes the old values back: the results of a conditional are in one memory.
        """
        measured = self.measure(state, losses, grads)
        applied, unchanged = self.judge(state, measured, batch_step)
        arguments |= {"step": state.step, "norm": measured.grad_norm}
        new, squares = self._update_parts(state, grads, applied, arguments)
        new = new._replace(params=lax.optimization_barrier(new.params))
        after = unchanged._replace(
            step=state.step + applied.astype(jnp.int32),
            params=self.model.trainable.replace(state.params, new.params),
            optimizer=new.optimizer,
            masters=new.masters,
        )
        rate = self.learning_rate(state.step)
        for part in self.parts:
            if "masters" not in part.specs(self.model):  # whose masters are updated with their layer
                after, rate = part.finish(state, after, new.params), part.select_rate(new.optimizer, rate)
        after = after._replace(average=_choose(applied, after.average, state.average))
        moved, rate = _choose(applied, (jnp.sqrt(squares), rate), (jnp.float32(0), jnp.float32(0)))
        return self.record(state, after, StepMetrics(*measured, moved, rate), batch_step, applied)

    def _update_parts(self, state: TrainState, grads, applied, arguments: dict) -> tuple[Streamed, jax.Array]:
        """Returns the arrays after the update of one part after the other, and the sum of squares of all changes."""
        streamed = Streamed(self.model.trainable.select(state.params), state.optimizer, state.masters)
        before = _flatten(streamed)
        after, total = dict(before), jnp.float32(0)
        for part, length in _divide(streamed.params):
            like = self._describe_part(part, streamed.masters)
            arrays = {name: before[name] for name in _flatten(like)}
            part_grads = tree_util.tree_map_with_path(lambda path, _: grads[path[0].key][path[1].key], part)
            update = _update_layers if length else _update_others
            new, squares = update(self, like, arrays, part_grads, applied, arguments)
            after, total = after | new, total + squares
        return _fill(streamed, after), total

    def _describe_part(self, params: dict, masters: dict) -> Streamed:
        """Returns the tree of a part's arrays; its leaves are not read."""
        exact = master_weights.exact_shapes(jax.eval_shape(lambda tree: tree, params))
        masters = {
            module: {name: leaf for name, leaf in leaves.items() if name in params[module]}
            for module, leaves in masters.items()
            if module in params
        }
        return Streamed(params, jax.eval_shape(self.optimizer.init, exact), masters)

    def update_arrays(self, like: Streamed, arrays: dict, grads, arguments: dict) -> tuple[dict, jax.Array]:
        """Returns the arrays of one part after its update, all on the device, and the sum of squares of its change."""
        part, config = _fill(like, arrays), self.config
        before = master_weights.trainable_parameters(part.params, part.masters, config)
        updates, optimizer_state = self.optimizer.update(grads, part.optimizer, before, **arguments)
        trained = jax.tree.map(add_if_finite, before, updates)
        masters = {module: {name: trained[module][name] for name in leaves} for module, leaves in part.masters.items()}
        rounded = master_weights.round_parameters(trained, config, arguments["step"] + 1)
        new = Streamed(rounded, optimizer_state, masters)
        moved = jax.tree.map(jnp.subtract, trained, before)
        return _flatten(new), self.model.sum_squares(moved)


def is_offloaded(path: tuple, leaf) -> bool:
    """Returns whether an array of the optimizer is in the host's memory: those of matrices are."""
    return leaf.ndim > 0 and leaf.ndim - is_stacked(path[-2].key) >= 2


def _divide(params: dict) -> list[tuple[dict, int]]:
    """Returns the parts that are updated one after the other: (parameters, number of layers; 0 if not of layers).

    The parameters outside of the layers are one part: XLA rounds the divisions of smaller programs differently.
    """
    parts: dict[int, dict] = {}
    for module, leaves in params.items():
        for name, leaf in leaves.items():
            length = leaf.shape[0] if is_stacked(module) else 0  # only some layers may have experts
            parts.setdefault(length, {}).setdefault(module, {})[name] = leaf
    return [(part, length) for length, part in parts.items()]


def _update_layers(update: OffloadedUpdate, like: Streamed, arrays: dict, grads, applied, arguments: dict):
    """Updates stacked arrays in a loop over the layers, each in its place.

    XLA starts all copies of a layer to the device at once, and each copy back when its matrix is updated: both
    directions of the link are busy. It would not be so if the loop read one layer ahead: libtpu 0.0.52 then starts each
    copy back after one to the device has ended.
    """
    counters = {name: leaf for name, leaf in arrays.items() if leaf.ndim == 0}
    stacked = {name: leaf for name, leaf in arrays.items() if leaf.ndim}
    hosted = _find_offloaded(like)

    def update_layer(i, carry):
        stacked, _, total = carry
        layer = {name: _read(leaf, i, name in hosted) for name, leaf in stacked.items()}
        layer_grads = jax.tree.map(lambda g: lax.dynamic_slice_in_dim(g, i, 1), grads)
        new, squares = update.update_arrays(like, layer | counters, layer_grads, arguments)
        new = _choose(applied, new, layer | counters)  # a conditional would wait for all copies of the layer
        written = {name: _write(leaf, new[name], i, name in hosted) for name, leaf in stacked.items()}
        return written, {name: new[name] for name in counters}, total + squares

    length = len(next(iter(stacked.values())))
    stacked, counters, total = lax.fori_loop(0, length, update_layer, (stacked, counters, jnp.float32(0)))
    return stacked | counters, total


def _update_others(update: OffloadedUpdate, like: Streamed, arrays: dict, grads, applied, arguments: dict):
    """Updates the arrays outside of the layers."""
    hosted = _find_offloaded(like)
    on_device = {name: _move(leaf, _DEVICE_SPACE, name in hosted) for name, leaf in arrays.items()}
    change = functools.partial(update.update_arrays, like, on_device, grads, arguments)
    new, squares = lax.cond(applied, change, lambda: (on_device, jnp.float32(0)))
    return {name: _move(leaf, _HOST_SPACE, name in hosted) for name, leaf in new.items()}, squares


def _read(stack, i, hosted: bool):
    return _move(lax.dynamic_slice_in_dim(stack, i, 1), _DEVICE_SPACE, hosted)


def _write(stack, layer, i, hosted: bool):
    return lax.dynamic_update_slice_in_dim(stack, _move(layer, _HOST_SPACE, hosted), i, 0)


def _move(leaf, space, hosted: bool):
    return jax.device_put(leaf, space) if hosted else leaf


def _find_offloaded(like: Streamed) -> set[str]:
    """Returns the names of the arrays in the host's memory."""
    leaves = tree_util.tree_leaves_with_path(like._replace(params={}))
    return {tree_util.keystr(path) for path, leaf in leaves if is_offloaded(path, leaf)}


def _flatten(tree) -> dict:
    return {tree_util.keystr(path): leaf for path, leaf in tree_util.tree_leaves_with_path(tree)}


def _fill(like, leaves: dict):
    return tree_util.tree_map_with_path(lambda path, _: leaves[tree_util.keystr(path)], like)


def _choose(applied, new, old):
    return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)
