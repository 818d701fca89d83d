"""Predicts the bytes that one device holds while it trains, from shapes and specs; touches no device."""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.analysis import liveness, traced
from shardformer.config import Config
from shardformer.config.names import AXES, MATRICES
from shardformer.hardware.chips import find_chip
from shardformer.kernels.fused_attention import Hardware
from shardformer.kernels.staged_scatter import IN_ONE_STAGE, Scattering, choose_scattering
from shardformer.kernels.vocabulary_loss import tokens_at_once
from shardformer.model import lora
from shardformer.model.model import describe_hardware
from shardformer.shards.attention import Method, choose_method
from shardformer.tables import format_bytes, format_table
from shardformer.training.step import Trainer


class DeviceBytes(NamedTuple):
    """The bytes of each kind of array on one device."""

    parameters: int
    gradients: int  # while a step runs
    optimizer: int  # with float32 masters of parameters that are stored in bfloat16
    average: int

    @property
    def total(self) -> int:
        return sum(self)


@functools.lru_cache
def predict_bytes(config: Config) -> DeviceBytes:
    """Returns the exact bytes of a training state's live arrays on each device of the config's mesh."""
    trainer = traced.make_trainer(config)
    state, model = trainer.abstract, trainer.model
    grad_shardings = jax.tree.map(model.sharding, model.grad_specs)
    gradients = jax.tree.map(_shard_bytes, lora.select_learned(model.shapes, config), grad_shardings)
    held = [jax.tree.map(lambda leaf: _shard_bytes(leaf, leaf.sharding), tree) for tree in state]
    _, parameters, optimizer, average, masters, _ = map(_sum, held)
    return DeviceBytes(parameters, _sum(gradients), optimizer + masters, average)


def estimate_temporaries(
    config: Config, cpu: bool = False, pad_heads: bool = False, way: Scattering = IN_ONE_STAGE
) -> int:
    """Estimates the bytes beside `predict_bytes` while a step runs, mostly activations; see liveness.py.

    cpu: as XLA compiles for a CPU, which widens bfloat16 to float32. pad_heads: as for the attention kernel of a TPU.
    way: how devices scatter gradients.
    """
    widened = config.replace(dtype="float32", param_dtype="float32") if cpu else config
    trainer, bodies = traced.trace(widened, way)
    gradients = predict_bytes(config).gradients
    head_size = config.head_size if pad_heads else 0
    at_worst = max(liveness.peak_bytes(body, cpu, head_size) for body in bodies)
    beside_updates = max(at_worst - gradients, gradients)  # the optimizer's updates are as large as the gradients
    return beside_updates + (0 if cpu else _cast_bytes(trainer))


def estimate_on(hardware: Hardware, config: Config, torus: tuple[int, ...]) -> int:
    """Estimates as `estimate_temporaries` for devices other than CPUs, with the choices that they would make.

    torus: the sizes of the dimensions in which TPUs are neighbours.
    """
    is_tpu = hardware.platform == "tpu"
    pad_heads = is_tpu and bool(_choose_method(hardware, config).kernel)
    way = scattering_on(hardware, config, torus)
    return estimate_temporaries(choose_as(hardware, config), pad_heads=pad_heads, way=way)


def scattering_on(hardware: Hardware, config: Config, torus: tuple[int, ...]) -> Scattering:
    """Returns the way in which devices would scatter gradients."""
    if hardware.platform != "tpu" or config.cp > 1:
        return IN_ONE_STAGE
    return choose_scattering(_factor_dp(config, torus), hardware, math.prod(torus))


def _factor_dp(config: Config, torus: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimensions that dp follows, as `torus.factor_dp` finds them on devices; (dp,) if parts of some."""
    if math.prod(torus) <= 8 and len(torus) == 2:
        return (config.dp,)  # JAX orders so few chips of a plane in one ring
    sizes = [size for size in torus if size > 1]
    choices = (taken for n in range(len(sizes), 0, -1) for taken in itertools.combinations(sizes, n))
    return next((taken for taken in choices if math.prod(taken) == config.dp), (config.dp,))


def choose_as(hardware: Hardware, config: Config) -> Config:
    """Returns the config with the choices that devices would make.

    Attention is in blocks if the devices would use their kernel, which keeps as little. The loss takes their chunk.
    """
    method = _choose_method(hardware, config)
    chunk = config.loss_chunk or tokens_at_once(config.padded_vocab // config.mp, hardware.platform)
    attention = "blocks" if method.kernel else config.attention
    return config.replace(attention=attention, loss_chunk=chunk, context_parallel=method.way or config.context_parallel)


def _choose_method(hardware: Hardware, config: Config) -> Method:
    """Returns the way in which devices would compute attention."""
    return choose_method(config, hardware, config.seq // config.cp, bool(config.dropout), config.mask_documents)


def _cast_bytes(trainer: Trainer) -> int:
    """Returns the bytes of cast matrices: XLA casts the stacked matrices of all layers before the loop over them.

    With zero=3 these are a device's parts, which each layer then gathers.
    """
    config = trainer.config
    if config.param_dtype == config.dtype or config.zero == 1:
        return 0  # zero=1 gathers all layers before the loop, in the matmul dtype
    layers = trainer.abstract.params["transformer/layers"]
    return sum(_shard_bytes(layers[name], layers[name].sharding) // 2 for name in MATRICES if name in layers)


def predict_needed(config: Config) -> int:
    """Returns the bytes that each device of this program needs to train: exact state, and estimated temporaries."""
    held, devices = predict_bytes(config).total, jax.devices()
    if devices[0].platform == "cpu":
        return held + estimate_temporaries(config, cpu=True)
    chip = find_chip(devices[0].device_kind)
    fast_memory = int(chip.fast_memory) if chip else 0  # XLA fills it first
    return held + max(estimate_on(describe_hardware(devices[0]), config, _find_torus(devices)) - fast_memory, 0)


def _find_torus(devices: list) -> tuple[int, ...]:
    """Returns the sizes of the dimensions that the coordinates of TPUs span; () for other devices."""
    places = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    return tuple(max(line) - min(line) + 1 for line in zip(*places, strict=True))


def cache_bytes(config: Config, samples: int = 1) -> int:
    """Returns the bytes of the keys and values that `sample` caches, on one device."""
    width = -(-config.key_value_heads // config.mp) * config.head_size
    slots = sum(-(-min(window or config.seq, config.seq) // config.cp) for window in config.layer_windows)
    return 2 * slots * samples * width * jnp.dtype(config.dtype).itemsize


def split_of_layer(config: Config) -> tuple[dict[str, list], dict[str, tuple[int, int, int]]]:
    """Returns each device's slices of the batch and of the matrices of a layer, and the global shapes.

    A slice is the (start, stop) of layers, rows and columns. With pp > 1 the matrices are those of all layers.
    """
    model = traced.make_trainer(config).model
    shapes = {"batch": (1, config.batch, config.seq)}
    splits = {"batch": _slices(P(None, *model.row_spec), shapes["batch"], config)}
    for name in filter(model.shapes["transformer/layers"].__contains__, MATRICES):
        layers, *matrix = model.shapes["transformer/layers"][name].shape
        shapes[name] = (layers if config.pp > 1 else 1, *matrix)
        splits[name] = _slices(model.specs["transformer/layers"][name], shapes[name], config)
    return splits, shapes


def _slices(spec: P, shape: tuple[int, ...], config: Config) -> list[tuple]:
    """Returns for each device the (start, stop) of each dimension."""
    found = []
    for device in range(config.devices):
        at = dict(zip(AXES, np.unravel_index(device, config.mesh_shape), strict=False))
        sizes = dict(zip(AXES, config.mesh_shape, strict=False))
        ranges = []
        for dimension, size in enumerate(shape):
            axes = spec[dimension] if dimension < len(spec) else None
            part, parts = 0, 1
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                part, parts = part * sizes[axis] + int(at[axis]), parts * sizes[axis]
            ranges.append((part * size // parts, (part + 1) * size // parts))
        found.append(tuple(ranges))
    return found


def summarize_bytes(config: Config) -> str:
    """Formats one line: 'parameters 60.05 kB, gradients 60.05 kB, optimizer 120.10 kB'."""
    return ", ".join(f"{kind} {format_bytes(n)}" for kind, n in predict_bytes(config)._asdict().items() if n)


def format_device_bytes(config: Config) -> str:
    predicted = predict_bytes(config)
    rows = [[kind, format_bytes(count)] for kind, count in predicted._asdict().items() if count]
    rows.append(["together", format_bytes(predicted.total)])
    return format_table(rows, ["kind", f"on one device of mesh {config.mesh}, besides activations"])


def _shard_bytes(leaf, sharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _sum(tree) -> int:
    return sum(jax.tree.leaves(tree))
