"""Names the first layer whose output or gradient is not finite. Costs some forward passes, after a failure only."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.config.names import LAYERS, PREFIX, is_stacked
from shardformer.devices import programs
from shardformer.model import Model
from shardformer.shards.parameters import map_stacked

EMBEDDING = f"{PREFIX}embed"


def describe_first_non_finite(evaluator: Any, state, step: int) -> str:
    """Returns a text that names the first non-finite layer of step `step` under a state's parameters.

    Returns "" if there is none: the text explains another problem, whose report must not depend on it.
    """
    trainer = evaluator.trainer
    try:
        batches = evaluator.corpus.train_batches(trainer.config, step - 1, trainer.local_rows)
        try:
            batch = trainer.to_devices(next(batches))
        finally:
            batches.close()
        output = find_output(trainer.model, state.params, batch) if "targets" in batch else ""  # a task has no layers
        return output or find_gradient(trainer.model, state.params, batch, trainer.dropout_key(np.int32(step - 1)))
    except Exception:
        return ""


def find_output(model: Model, params, batch) -> str:
    """Names the first layer whose output is not finite, by a binary search; returns "" if all are."""
    layers, sum_nats = model.config.model.layers, _compile_sums(model)
    batch = {name: values for name, values in batch.items() if name != "weights"}
    batch["weights"] = jnp.ones(batch["targets"].shape, jnp.float32, device=batch["targets"].sharding)

    def is_finite(count: int) -> bool:
        return bool(np.isfinite(np.asarray(sum_nats(params, batch, np.int32(count)))))

    if not is_finite(0):
        return "; the first non-finite output is that of the embedding"
    if is_finite(layers):
        return ""
    finite, broken = 0, layers
    while broken - finite > 1:
        middle = (finite + broken) // 2
        finite, broken = (middle, broken) if is_finite(middle) else (finite, middle)
    return f"; the first non-finite output is that of layer {broken - 1} of 0 to {layers - 1}"


def find_gradient(model: Model, params, batch, dropout_key) -> str:
    """Names the parameters whose gradients become non-finite first in the backward pass."""
    flags = _compile_flags(model)(params, batch, dropout_key)
    numbers = {name: model.config.mixture.layers_of(name) if is_stacked(name) else [0] for name in flags}
    broken = {name: np.array(numbers[name])[~np.atleast_1d(finite)] for name, finite in flags.items()}
    broken = {name: layers for name, layers in broken.items() if layers.size}
    after = [name for name in broken if not name.startswith((LAYERS, EMBEDDING))]
    if after or not broken:
        return f"; the first non-finite gradient is that of {', '.join(after)}" if after else ""
    inside = {name: layers[-1] for name, layers in broken.items() if name.startswith(LAYERS)}
    if not inside:
        return f"; the first non-finite gradient is that of {', '.join(broken)}"
    layer = max(inside.values())
    names = ", ".join(name.rpartition("/")[2] for name, last in inside.items() if last == layer)
    return f"; the first non-finite gradient is that of layer {layer} ({names})"


@functools.cache
def _compile_sums(model: Model):
    """Returns the loss of the model's first layers as a function of their number.

    A layer whose parameters are all zero adds nothing to its input, so one program serves every number of layers.
    """

    def sum_nats(params, batch, count):
        def keep_first(name, p):
            number = jnp.array(model.config.mixture.layers_of(name)).reshape(-1, *[1] * (p.ndim - 1))
            return jnp.where(number < count, p, jnp.zeros_like(p))

        return model.sums(map_stacked(keep_first, params), batch).nats

    return programs.jit(sum_nats, out_shardings=model.sharding(P()))


@functools.cache
def _compile_flags(model: Model):
    """Returns a function that tells which gradients are finite: one flag for each layer of a parameter."""

    def find(params, batch, dropout_key):
        _, grads = model.loss_and_grad(params, batch, dropout_key)
        return {
            f"{module}/{name}": jnp.isfinite(g).all(tuple(range(1, g.ndim)) if is_stacked(module) else None)
            for module, leaves in grads.items()
            for name, g in leaves.items()
        }

    return programs.jit(find, out_shardings=model.sharding(P()))
