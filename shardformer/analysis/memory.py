"""Predicts the bytes that one device has while it trains, from shapes and specs; touches no device."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.adapters.adapter_keys import select_trainable
from shardformer.config import Config
from shardformer.config.names import AXES, EXPERT_MATRICES, HOST, LAYERS, MATRICES
from shardformer.layout import Layout
from shardformer.layout.mesh import make_abstract
from shardformer.tables import format_bytes, format_table
from shardformer.training.trainer import Trainer


class DeviceBytes(NamedTuple):
    """The bytes of each kind of array on one device."""

    parameters: int
    gradients: int  # while a step runs
    optimizer: int  # with float32 masters of parameters that are stored in bfloat16
    average: int
    reward_model: int = 0  # parameters of the one that scores a policy's answers
    host: int = 0  # of the host's memory, which offload=optimizer uses for each device

    @property
    def total(self) -> int:
        """The bytes of the device's memory."""
        return sum(self) - self.host

    def list_kinds(self) -> list[tuple[str, int]]:
        """Returns (kind, bytes) of the kinds of arrays on the device that there are."""
        return [(kind.replace("_", " "), count) for kind, count in self._asdict().items() if count and kind != "host"]


def make_trainer(config: Config, layout: Layout | None = None) -> Trainer:
    """Returns a trainer on a mesh without devices: it has shapes and traces, and its compiled functions cannot run."""
    return Trainer(config, make_abstract(config), layout)  # type: ignore[arg-type]


@functools.lru_cache
def predict_bytes(config: Config) -> DeviceBytes:
    """Returns the exact bytes of a training state's live arrays on each device of the config's mesh."""
    trainer = make_trainer(config)
    if config.stored.quantized and not config.lora.lora_rank:  # has neither gradients nor an optimizer
        return DeviceBytes(_sum(jax.tree.map(lambda p: shard_bytes(p, p.sharding), trainer.model.abstract)), 0, 0, 0)
    state, model = trainer.abstract, trainer.model
    grad_shardings = jax.tree.map(model.sharding, model.grad_specs)
    gradients = jax.tree.map(shard_bytes, select_trainable(model.shapes, config), grad_shardings)
    stored = [jax.tree.map(lambda leaf: shard_bytes(leaf, leaf.sharding), tree) for tree in state]
    _, parameters, optimizer, average, masters, *_ = map(_sum, stored)
    host = sum(shard_bytes(leaf, leaf.sharding) for _, leaf in list_offloaded(state))
    parameters += sum(shard_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(model.constant_shapes()))
    rewards = sum(shard_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(model.companion_shapes()))
    return DeviceBytes(parameters, _sum(gradients), optimizer + masters - host, average, rewards, host)


def list_offloaded(state) -> list[tuple]:
    """Returns (path, leaf) of the arrays of a training state in the host's memory."""
    leaves = jax.tree.leaves_with_path((state.optimizer, state.masters))
    return [(path, leaf) for path, leaf in leaves if leaf.sharding.memory_kind == HOST]


def cache_bytes(config: Config, samples: int = 1) -> int:
    """Returns the bytes of what `sample` caches on one device: keys and values, and ids for `previous_tokens`."""
    c, width = config.model, -(-config.model.cached_heads // config.parallel.mp) * sum(config.model.cached_sizes)
    slots = [-(-min(window or c.seq, c.seq) // config.parallel.cp) for window in c.cache_windows]
    of_layers = sum(slots[: c.layers]) * width * jnp.dtype(config.parallel.dtype).itemsize
    return samples * (of_layers + sum(slots[c.layers :]) * jnp.dtype("int32").itemsize)


def split_of_layer(config: Config) -> tuple[dict[str, list], dict[str, tuple[int, int, int]]]:
    """Returns each device's slices of the batch and of the matrices of a layer, and the global shapes.

    A slice is the (start, stop) of layers, rows and columns. With pp > 1 the matrices are those of all layers. Matrices
    of experts have experts instead of layers: those of one layer.
    """
    model = make_trainer(config).model
    shapes = {"batch": (1, config.training.batch, config.model.seq)}
    splits = {"batch": _slices(P(None, *model.row_spec), shapes["batch"], config)}
    stacked, specs = model.shapes[LAYERS], model.specs[LAYERS]
    for name in filter(stacked.__contains__, (*MATRICES, *EXPERT_MATRICES)):
        layers, *matrix = stacked[name].shape
        of_one_layer = name in EXPERT_MATRICES
        shapes[name] = tuple(matrix) if of_one_layer else (layers if config.parallel.pp > 1 else 1, *matrix)
        splits[name] = _slices(P(*specs[name][1:]) if of_one_layer else specs[name], shapes[name], config)
    return splits, shapes


def tokens_of_device(config: Config, device: int) -> list[tuple[int, int]]:
    """Returns the (start, stop) of the tokens of a row that a device has: with cp > 1 two chunks."""
    seq, cp = config.model.seq, config.parallel.cp
    if cp == 1:
        return [(0, seq)]
    at = dict(zip(AXES, np.unravel_index(device, config.parallel.mesh_shape), strict=False))
    chunk, shard = seq // (2 * cp), int(at["cp"])
    return [(n * chunk, (n + 1) * chunk) for n in (shard, 2 * cp - 1 - shard)]


def _slices(spec: P, shape: tuple[int, ...], config: Config) -> list[tuple]:
    """Returns for each device the (start, stop) of each dimension."""
    result = []
    for device in range(config.parallel.devices):
        at = dict(zip(AXES, np.unravel_index(device, config.parallel.mesh_shape), strict=False))
        sizes = dict(zip(AXES, config.parallel.mesh_shape, strict=False))
        ranges = []
        for dimension, size in enumerate(shape):
            axes = spec[dimension] if dimension < len(spec) else None
            part, parts = 0, 1
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                part, parts = part * sizes[axis] + int(at[axis]), parts * sizes[axis]
            ranges.append((part * size // parts, (part + 1) * size // parts))
        result.append(tuple(ranges))
    return result


def summarize_bytes(config: Config) -> str:
    """Formats one line: 'parameters 60.05 kB, gradients 60.05 kB, optimizer 120.10 kB'."""
    return ", ".join(f"{kind} {format_bytes(n)}" for kind, n in predict_bytes(config).list_kinds())


def format_device_bytes(config: Config) -> str:
    predicted = predict_bytes(config)
    rows = [[kind, format_bytes(count)] for kind, count in predicted.list_kinds()]
    rows.append(["together", format_bytes(predicted.total)])
    if predicted.host:
        rows.append(["optimizer, in the host's memory", format_bytes(predicted.host)])
    return format_table(rows, ["kind", f"on one device of mesh {config.parallel.mesh}, besides activations"])


def shard_bytes(leaf, sharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _sum(tree) -> int:
    return sum(jax.tree.leaves(tree))
