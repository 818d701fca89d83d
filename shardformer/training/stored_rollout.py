"""The sampled answers that a step learns from, as a part of the state: a resume goes on with the same ones."""

import jax
import jax.numpy as jnp

from shardformer.model import TaskOnMesh
from shardformer.training.step import OneProgram, Part, TrainState


class StoredRollout(Part):
    """The arrays of the last rollout; zeros before the first."""

    def __init__(self, model: TaskOnMesh):
        self._shapes = model.batch_shapes()

    def start(self, params) -> dict:
        return {"rollout": {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in self._shapes.items()}}

    def specs(self, model: TaskOnMesh) -> dict:
        return {"rollout": dict.fromkeys(self._shapes, model.row_spec)}


class RolloutProgram(OneProgram):
    """The step, whose batch is the rollout of the state."""

    def train_step(self, state: TrainState, batch, batch_step) -> tuple[TrainState, jax.Array]:
        return super().train_step(state, state.rollout, batch_step)
