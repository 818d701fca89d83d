"""The bytes that each device needs to train, by which mesh=auto is chosen."""

import jax

from shardformer.analysis.memory import predict_bytes
from shardformer.config import Config
from shardformer.devices.chips import describe_hardware, find_chip
from shardformer.layout import resolve, torus
from shardformer.layout.mesh import count_matrix_elements, device_memory


def predict_unless_small(config: Config) -> int:
    """Returns the bytes that each device needs to train, or an upper bound if that fits into a quarter of its memory.

    The bound needs no trace of the step, which is a sixth of the CPU time of a small run's start. It does not count
    experts, latents, a teacher, a reward model, a further prediction, a user's task, the history of L-BFGS, or the
    state of a user's optimizer.
    """
    unbounded = config.optimizer.searches_rate or config.optimizer.is_code or not config.objective.has_bound_of_bytes
    if not (config.experts.experts or config.model.kv_latent or unbounded):
        bound = _bound_needed(config)
        if bound * len(jax.devices()) <= device_memory() / 4:
            return bound
    return predict_needed(config)


def _bound_needed(config: Config) -> int:
    """Returns several times the bytes of a dense model's training step on one device with the full batch."""
    model, tokens = config.model, config.training.batch * config.model.seq
    activations = 16 * model.d_model + 8 * model.ff_size + 8 * model.heads * (model.seq + model.head_size)
    elements = model.layers * (tokens * activations + 8 * count_matrix_elements(model))
    elements += 8 * (tokens + 2 * model.d_model) * (model.vocab + model.vocab_multiple)
    elements += 8 * model.seq * model.d_model  # learned positions
    return 16 * elements  # four times float32


def predict_needed(config: Config) -> int:
    """Returns the bytes that each device of this program needs to train: exact state, and estimated temporaries."""
    from shardformer.analysis.temporaries import estimate_temporaries  # not imported for a small run

    predicted, devices = predict_bytes(config), jax.devices()
    stored = predicted.total
    if devices[0].platform == "cpu":  # whose one memory is the host's
        return stored + predicted.host + estimate_temporaries(resolve(config))
    chip = find_chip(devices[0].device_kind)
    fast_memory = int(chip.fast_memory) if chip else 0  # XLA fills it first
    hardware = describe_hardware(devices[0])
    layout = resolve(config, hardware, torus.factor_slice(config, hardware, _find_torus(devices)))
    return stored + max(estimate_temporaries(layout) - fast_memory, 0)


def _find_torus(devices: list) -> tuple[int, ...]:
    """Returns the sizes of the dimensions that the coordinates of TPUs span; () for other devices."""
    places = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    return tuple(max(line) - min(line) + 1 for line in zip(*places, strict=True))
