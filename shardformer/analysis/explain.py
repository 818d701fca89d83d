"""A tour of the methods of splitting a small model: the memory, the collectives and the results of each."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from shardformer.analysis import memory, program_collectives, verify
from shardformer.analysis.memory import DeviceBytes
from shardformer.analysis.verify import Difference
from shardformer.config import Config
from shardformer.config.presets import preset
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.model.measuring import measure_routes

DEVICES = 4
STOPS: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({"mesh": "1x1"}, "One device holds everything and computes everything. The others are compared with it."),
    "data parallel": (
        {"mesh": "4x1"},
        "Every device holds the whole model and a quarter of the batch. After the backward pass one all-reduce per "
        "gradient makes the mean, so that all devices take the same step.",
    ),
    "tensor parallel": (
        {"mesh": "1x4"},
        "Every device holds a quarter of each matrix and sees the whole batch: columns of q, k, v and up, rows of o "
        "and down. A product with rows gives a part of a sum, so each layer ends in an all-reduce of activations.",
    ),
    "ZeRO": (
        {"mesh": "4x1", "zero": 3},
        "Data parallel, but each device keeps a quarter of the parameters, gradients and optimizer. A layer is "
        "gathered when its turn comes and dropped after it; gradients are reduced to the device that keeps them.",
    ),
    "both": (
        {"mesh": "2x2"},
        "Two halves of the batch on two halves of each matrix: activations are summed over mp, gradients over dp.",
    ),
    "pipeline": (
        {"mesh": "2x1x2", "accum": 2},
        "Data parallel, but each of two stages holds half of the layers. A microbatch goes from one stage to the next "
        "while others are before and after it, and comes back to the stage that embedded it for its loss.",
    ),
    "context parallel": (
        {"mesh": "dp2.cp2", "context_parallel": "ring"},
        "Data parallel, but two devices share each row: each has a chunk of its tokens from the front and the mirror "
        "image from the back, so that both have the same causal work. Keys and values visit the other device; their "
        "gradients come back. The gradients of the parameters are averaged over dp and cp.",
    ),
    "experts": (
        {"mesh": "2x2", "experts": 8, "expert_width": 32, "bias": "none", "expert_axes": "dp"},
        "Another model: eight small feed-forwards in each layer, of which a router chooses two for each token. Every "
        "device holds two of the eight. It gathers the tokens of both halves of the batch and computes those that "
        "chose its experts; the sums are scattered back over dp and added up over mp. No token is dropped, so that a "
        "device with popular experts has more work.",
    ),
}


class Routes(NamedTuple):
    """The routes of the tokens: the pairs of a token and an expert in each layer, and the devices of each expert."""

    layers: tuple[int, ...]
    count_LE: np.ndarray
    devices_E: tuple[tuple[int, ...], ...]  # which have at least a part of the expert

    @property
    def share_LE(self) -> np.ndarray:
        """Each expert's share of its layer's pairs."""
        return self.count_LE / self.count_LE.sum(1, keepdims=True)

    def share_of_device(self, device: int) -> np.ndarray:
        """Returns, for each layer, the share of the pairs whose expert a device has."""
        return self.share_LE[:, [device in devices for devices in self.devices_E]].sum(1)


class Stop(NamedTuple):
    """A method to split the model, and its measured costs."""

    title: str
    explanation: str
    config: Config
    stored: DeviceBytes
    sent: dict[tuple[str, str], tuple[int, float]]  # by (operation, axis): tensors, bytes sent by one device
    differences: list[Difference]
    routes: Routes | None = None  # of a model with experts


def small_model() -> Config:
    return preset("tiny").replace(vocab=64, heads=4, batch=8, mesh="1x1")


def tour(titles: Iterable[str] = tuple(STOPS)) -> Iterator[Stop]:
    """Compiles and runs the loss and its gradients on the mesh of each title."""
    batch = verify.random_batch(small_model())
    of_models: dict[Config, tuple] = {}  # the parameters and the dense results of each architecture
    for title in titles:
        changes, explanation = STOPS[title]
        config = small_model().replace(**changes)
        dense = config.replace(mesh="1x1", zero=0, accum=small_model().training.accum)
        if config.architecture not in of_models:
            drawn = Model.on(dense, mesh.make(dense)).init(0)
            of_models[config.architecture] = drawn, verify.reference_loss_and_gradients(dense, drawn, batch)
        parameters, expected = of_models[config.architecture]
        model = Model.on(config, mesh.make(config))
        loss, gradients, program = verify.loss_and_gradients(model, parameters, batch)

        differences = verify.compare_loss_and_gradients(expected, (loss, gradients))
        sent = program_collectives.total_by_kind(
            program_collectives.parse_collectives(program), config.parallel.mesh_shape
        )
        routes = follow_tokens(model, parameters, batch) if config.experts.experts else None
        yield Stop(title, explanation, config, memory.predict_bytes(config), sent, differences, routes)


def follow_tokens(model: Model, parameters: dict, batch: dict) -> Routes:
    """Returns the routes of a batch through a model with experts."""

    def count(parameters, batch):
        return measure_routes(model, parameters, batch)

    config = model.config
    counts = jax.jit(count)(jax.device_put(parameters, model.shardings), batch)
    splits = memory.split_of_layer(config)[0]["expert_up"]
    devices = [
        tuple(device for device, ((first, end), *_) in enumerate(splits) if first <= expert < end)
        for expert in range(config.experts.experts)
    ]
    layers = tuple(layer for layer, sparse in enumerate(config.mixture.sparse_layers) if sparse)
    return Routes(layers, np.asarray(counts), tuple(devices))
