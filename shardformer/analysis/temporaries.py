"""Estimates the bytes that a step needs besides its state, from its trace; touches no device."""

import dataclasses

from shardformer.analysis import liveness, traced
from shardformer.analysis.memory import list_offloaded, predict_bytes, shard_bytes
from shardformer.config.names import ALL_MATRICES, is_stacked
from shardformer.layout import Layout, resolve
from shardformer.training.trainer import Trainer


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


def _measure_streams(trainer: Trainer) -> tuple[int, int]:
    """Returns the bytes of the offloaded state of one layer, and of all parameters outside of the layers."""
    of_layer, of_others = 0, 0
    for path, leaf in list_offloaded(trainer.abstract):
        count = shard_bytes(leaf, leaf.sharding)
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
    names = [name for name in ALL_MATRICES if name in layers]
    return sum(shard_bytes(layers[name], layers[name].sharding) // 2 for name in names)
