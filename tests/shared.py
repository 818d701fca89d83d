"""One compiled model per configuration and mesh, shared by all tests, and a full disk."""

import contextlib
import functools
import math
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


def drawn(config: Config, seed: int):
    """Returns the parameters of a seed as one device draws them; only the architecture matters."""
    return _drawn(config.architecture, int(seed))


@functools.cache
def _drawn(architecture: Config, seed: int):
    # Compiled, this program takes a second; interpreted, a tenth, with the same bits.
    draw = Model.on(architecture, mesh.make(architecture)).draw_parameters
    parameters = exact.run(draw, np.int32(seed), floats="stored", change=_RoundAsXla()).outputs
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), parameters)


class _RoundAsXla:
    """Replaces the results of a draw that XLA rounds in another way: its erf_inv, and multiples of an array."""

    def __init__(self):
        self._multiples: list[tuple] = []  # (x * factor, x, factor)

    def __call__(self, equation, inputs, results, mesh):
        name = equation.primitive.name
        if name == "erf_inv":
            return [_compute_erf_inv(*inputs)]
        if name not in ("mul", "div") or results[0].dtype.kind != "f":
            return results
        x, factor = inputs if name == "div" else sorted(inputs, key=np.size, reverse=True)
        if factor.size > 1:
            return results
        factor = _round(1 / factor) if name == "div" else factor
        for multiple, of, first in self._multiples if _merges_factors() else ():
            if multiple is x:
                x, factor = of, _round(factor * first)
        result = _round(x * factor)
        self._multiples.append((result, x, factor))
        return [result]


def _round(x):
    return np.float64(np.float32(x))


@functools.cache
def _merges_factors() -> bool:
    """Returns whether XLA computes (x * 0.3) * 0.7 as x * (0.3 * 0.7), as that of JAX 0.10 does."""
    x, first, second = np.linspace(1, 2, 100, dtype=np.float32), np.float32(0.3), np.float32(0.7)
    return np.array_equal(jax.jit(lambda x: x * first * second)(x), x * (first * second))


def _compute_erf_inv(x):
    padded = np.zeros(4 ** math.ceil(math.log(max(x.size, 2), 4)), np.float32)  # few sizes: each is compiled
    padded[: x.size] = x.reshape(-1)
    return np.asarray(_erf_inv(padded))[: x.size].reshape(x.shape).astype(np.float64)


_erf_inv = jax.jit(jax.lax.erf_inv)


def trainer(**overrides) -> Trainer:
    return _trainer(tiny(**overrides))


@functools.cache
def _trainer(config: Config) -> Trainer:
    return Trainer(config, mesh.make(config))


@functools.cache
def _initial(config: Config):
    return on_host(_trainer(config).init())


def initial_state(**overrides):
    """Returns the initial state of one device, split; test_initialisation compares it bitwise with each mesh's own."""
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
