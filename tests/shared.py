"""One compiled model per configuration and mesh, shared by all tests, and a full disk."""

import contextlib
import functools
import resource

import jax
import numpy as np

from shardformer import exact, preset
from shardformer.config import Config
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.training.trainer import Trainer

MESHES = ("8x1", "4x2", "2x4", "1x8")
VOCAB = 61  # padded to 64: three entries that no mesh may ever predict


def tiny(**overrides):
    return preset("tiny").replace(**{"vocab": VOCAB, "mesh": "4x2"} | overrides)


init = Model.init  # which conftest.py replaces


def drawn(config: Config, seed: int):
    """Returns the parameters of a seed, which may be rounded otherwise than by XLA; only the architecture matters.

    The interpreter takes a tenth of a second for them, and XLA compiles the program for a second.
    """
    return _drawn(config.architecture, int(seed))


@functools.cache
def _drawn(architecture: Config, seed: int):
    draw = Model.on(architecture, mesh.make(architecture)).draw_parameters
    parameters = exact.run(draw, np.int32(seed), floats="stored").outputs
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), parameters)


def trainer(**overrides) -> Trainer:
    return _trainer(tiny(**overrides))


@functools.cache
def _trainer(config: Config) -> Trainer:
    return Trainer(config, mesh.make(config))


@functools.cache
def _initial(config: Config):
    return on_host(_trainer(config).init())


def initial_state(**overrides):
    """Returns the initial state of one device, split over the mesh."""
    return jax.device_put(_initial(tiny(**overrides | {"mesh": "1x1"})), trainer(**overrides).shardings)


def update_and_grads(**overrides):
    """Returns a jitted (state, batch, step) -> (state, metrics, grads), which serves losses, gradients and steps."""
    return _update_and_grads(trainer(**overrides))


@functools.cache
def _update_and_grads(t: Trainer):
    def run(state, batch, step):
        losses, grads = t.model.loss_and_grad(state.params, batch, t.dropout_key(state.step))
        return *t.update.apply(state, losses, grads, step), grads

    return jax.jit(run)


def batch(seed: int = 0, rows: int = 8, seq: int = 16) -> dict:
    ids = np.random.RandomState(seed).randint(0, VOCAB, (rows, seq + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@contextlib.contextmanager
def room(nbytes):
    """Limits the size of a file as a full disk would: a real error, after a real short write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
