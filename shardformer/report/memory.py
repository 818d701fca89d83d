"""The bytes that one device holds while it trains, predicted from shapes and specs; no device is touched."""

import math
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from shardformer import lora, mesh
from shardformer.config import Config
from shardformer.tables import format_bytes, format_table
from shardformer.training.step import Trainer


class DeviceBytes(NamedTuple):
    """What one device holds of each kind of array."""

    parameters: int
    gradients: int  # while a step runs
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        return sum(self)


def predict_bytes(config: Config) -> DeviceBytes:
    """Exact: what the live arrays of a training state take, on each device of the config's mesh."""
    trainer = Trainer(config, abstract_mesh(config))
    state, model = trainer.abstract, trainer.model
    grad_shardings = jax.tree.map(model.sharding, model.grad_specs)
    gradients = jax.tree.map(_shard_bytes, lora.select_learned(model.shapes, config), grad_shardings)
    held = [jax.tree.map(lambda leaf: _shard_bytes(leaf, leaf.sharding), tree) for tree in state]
    _, parameters, optimizer, average = map(_sum, held)
    return DeviceBytes(parameters, _sum(gradients), optimizer, average)


def abstract_mesh(config: Config) -> AbstractMesh:
    """The config's mesh without devices."""
    return AbstractMesh(config.mesh_shape, mesh.AXES, axis_types=(AxisType.Auto,) * len(mesh.AXES))


def format_device_bytes(config: Config) -> str:
    predicted = predict_bytes(config)
    rows = [[kind, format_bytes(count)] for kind, count in predicted._asdict().items() if count]
    rows.append(["together", format_bytes(predicted.total)])
    return format_table(rows, ["kind", f"on one device of mesh {config.mesh}, besides activations"])


def _shard_bytes(leaf, sharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _sum(tree) -> int:
    return sum(jax.tree.leaves(tree))
