"""Predicts the bytes that one device has while it trains, from shapes and specs; touches no device."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.analysis import liveness, traced
from shardformer.config import Config
from shardformer.config.names import AXES, EXPERT_MATRICES, HOST, LAYERS, MATRICES, SHARED_MATRICES, is_stacked
from shardformer.devices.chips import find_chip
from shardformer.layout import Layout, resolve, torus
from shardformer.layout.mesh import describe_hardware, device_memory
from shardformer.model import lora
from shardformer.tables import format_bytes, format_table
from shardformer.training.trainer import Trainer


class DeviceBytes(NamedTuple):
    """The bytes of each kind of array on one device."""

    parameters: int
    gradients: int  # while a step runs
    optimizer: int  # with float32 masters of parameters that are stored in bfloat16
    average: int
    host: int = 0  # of the host's memory, which offload=optimizer uses for each device

    @property
    def total(self) -> int:
        """The bytes of the device's memory."""
        return sum(self) - self.host

    def list_kinds(self) -> list[tuple[str, int]]:
        """Returns (kind, bytes) of the kinds of arrays on the device that there are."""
        return [(kind, count) for kind, count in self._asdict().items() if count and kind != "host"]


@functools.lru_cache
def predict_bytes(config: Config) -> DeviceBytes:
    """Returns the exact bytes of a training state's live arrays on each device of the config's mesh."""
    trainer = traced.make_trainer(config)
    if config.stored.quantized and not config.lora.lora_rank:  # has neither gradients nor an optimizer
        return DeviceBytes(_sum(jax.tree.map(lambda p: _shard_bytes(p, p.sharding), trainer.model.abstract)), 0, 0, 0)
    state, model = trainer.abstract, trainer.model
    grad_shardings = jax.tree.map(model.sharding, model.grad_specs)
    gradients = jax.tree.map(_shard_bytes, lora.select_trainable(model.shapes, config), grad_shardings)
    stored = [jax.tree.map(lambda leaf: _shard_bytes(leaf, leaf.sharding), tree) for tree in state]
    _, parameters, optimizer, average, masters, *_ = map(_sum, stored)
    host = sum(_shard_bytes(leaf, leaf.sharding) for _, leaf in _list_offloaded(state))
    parameters += sum(_shard_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(model.constant_shapes()))
    return DeviceBytes(parameters, _sum(gradients), optimizer + masters - host, average, host)


def estimate_temporaries(layout: Layout) -> int:
    """Estimates the bytes besides `predict_bytes` while a step runs, mostly activations; see liveness.py.

    XLA widens bfloat16 to float32 on a CPU. The attention kernel of a TPU pads heads.
    """
    config, platform = layout.config, layout.hardware.platform
    cpu, gradients = platform == "cpu", predict_bytes(config).gradients
    head_size = config.model.head_size if platform == "tpu" and layout.attention.uses_kernel else 0
    trainer, bodies = traced.trace(_widen(layout) if cpu else layout)
    at_worst = max(liveness.peak_bytes(body, cpu, head_size) for body in bodies)
    besides = max(at_worst - gradients, gradients)  # the optimizer's updates are as large as the gradients
    if config.optimizer.offload != "none":
        # A TPU copies the state of the others before the backward pass, and back during the loop over layers.
        of_layer, of_others = _measure_streams(trainer)
        besides = max(at_worst - gradients, 2 * of_layer) + of_others
    return besides + (0 if cpu else _cast_bytes(trainer))


def _list_offloaded(state) -> list[tuple]:
    """Returns (path, leaf) of the arrays of a training state in the host's memory."""
    leaves = jax.tree.leaves_with_path((state.optimizer, state.masters))
    return [(path, leaf) for path, leaf in leaves if leaf.sharding.memory_kind == HOST]


def _measure_streams(trainer: Trainer) -> tuple[int, int]:
    """Returns the bytes of the offloaded state of one layer, and of all parameters outside of the layers."""
    of_layer, of_others = 0, 0
    for path, leaf in _list_offloaded(trainer.abstract):
        count = _shard_bytes(leaf, leaf.sharding)
        if is_stacked(path[-2].key):
            of_layer += count // leaf.shape[0]
        else:
            of_others += count
    return of_layer, of_others


def _widen(layout: Layout) -> Layout:
    config = layout.config.replace(dtype="float32", param_dtype="float32")
    widened = resolve(config, layout.hardware, layout.torus)
    return dataclasses.replace(widened, attention=layout.attention, loss_chunk=layout.loss_chunk)


def _cast_bytes(trainer: Trainer) -> int:
    """Returns the bytes of cast matrices: XLA casts the stacked matrices of all layers before the loop over them.

    With zero=3 these are a device's parts, which each layer then gathers.
    """
    config = trainer.config
    if config.optimizer.param_dtype == config.parallel.dtype or config.parallel.zero == 1:
        return 0  # zero=1 gathers all layers before the loop, in the matmul dtype
    layers = trainer.abstract.params["transformer/layers"]
    names = [name for name in (*MATRICES, *EXPERT_MATRICES, *SHARED_MATRICES) if name in layers]
    return sum(_shard_bytes(layers[name], layers[name].sharding) // 2 for name in names)


def predict_needed(config: Config) -> int:
    """Returns the bytes that each device of this program needs to train: exact state, and estimated temporaries."""
    predicted, devices = predict_bytes(config), jax.devices()
    stored = predicted.total
    if devices[0].platform == "cpu":  # whose one memory is the host's
        return stored + predicted.host + estimate_temporaries(resolve(config))
    chip = find_chip(devices[0].device_kind)
    fast_memory = int(chip.fast_memory) if chip else 0  # XLA fills it first
    hardware = describe_hardware(devices[0])
    layout = resolve(config, hardware, torus.factor_slice(config, hardware, _find_torus(devices)))
    return stored + max(estimate_temporaries(layout) - fast_memory, 0)


def predict_unless_small(config: Config) -> int:
    """Returns predict_needed, or a coarse upper bound if all devices' bounds fit into a quarter of one's memory.

    The bound needs no trace of the step, which is a sixth of the CPU time of a small run's start. It does not count
    experts, a teacher, or the history of L-BFGS.
    """
    if config.experts.experts or config.preferences.teacher or config.optimizer.name == "lbfgs":
        return predict_needed(config)
    bound = _bound_needed(config)
    return bound if bound * len(jax.devices()) <= device_memory() / 4 else predict_needed(config)


def _bound_needed(config: Config) -> int:
    """Returns several times the bytes of a dense model's training step on one device with the full batch."""
    model, tokens = config.model, config.training.batch * config.model.seq
    activations = 16 * model.d_model + 8 * model.ff_size + 8 * model.heads * (model.seq + model.head_size)
    matrices = 4 * model.heads * model.head_size * model.d_model + 3 * model.d_model * model.ff_size
    elements = model.layers * (tokens * activations + 8 * matrices)
    elements += 8 * (tokens + 2 * model.d_model) * (model.vocab + model.vocab_multiple)
    elements += 8 * model.seq * model.d_model  # learned positions
    return 16 * elements  # four times float32


def _find_torus(devices: list) -> tuple[int, ...]:
    """Returns the sizes of the dimensions that the coordinates of TPUs span; () for other devices."""
    places = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    return tuple(max(line) - min(line) + 1 for line in zip(*places, strict=True))


def cache_bytes(config: Config, samples: int = 1) -> int:
    """Returns the bytes of the keys and values that `sample` caches, on one device."""
    width = -(-config.model.key_value_heads // config.parallel.mp) * config.model.head_size
    slots = sum(
        -(-min(window or config.model.seq, config.model.seq) // config.parallel.cp)
        for window in config.model.layer_windows
    )
    return 2 * slots * samples * width * jnp.dtype(config.parallel.dtype).itemsize


def split_of_layer(config: Config) -> tuple[dict[str, list], dict[str, tuple[int, int, int]]]:
    """Returns each device's slices of the batch and of the matrices of a layer, and the global shapes.

    A slice is the (start, stop) of layers, rows and columns. With pp > 1 the matrices are those of all layers. Matrices
    of experts have experts instead of layers: those of one layer.
    """
    model = traced.make_trainer(config).model
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


def _shard_bytes(leaf, sharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _sum(tree) -> int:
    return sum(jax.tree.leaves(tree))
