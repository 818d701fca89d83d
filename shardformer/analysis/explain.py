"""A tour of the methods of splitting a small model: the memory, the collectives and the results of each."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from shardformer.analysis import memory, program_collectives, verify
from shardformer.analysis.memory import DeviceBytes
from shardformer.analysis.verify import Difference
from shardformer.config import Config
from shardformer.config.presets import preset
from shardformer.layout import mesh
from shardformer.model import Model

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
}


class Stop(NamedTuple):
    """A method to split the model, and its measured costs."""

    title: str
    words: str
    config: Config
    held: DeviceBytes
    sent: dict[tuple[str, str], tuple[int, float]]  # by (operation, axis): tensors, bytes sent by one device
    differences: list[Difference]


def small_model() -> Config:
    return preset("tiny").replace(vocab=64, heads=4, batch=8, mesh="1x1")


def tour(titles: Iterable[str] = tuple(STOPS)) -> Iterator[Stop]:
    """Compiles and runs the loss and its gradients on the mesh of each title."""
    dense = Model.on(small_model(), mesh.make(small_model()))
    parameters, batch = dense.init(0), verify.random_batch(small_model())
    expected = verify.reference_loss_and_gradients(small_model(), parameters, batch)
    for title in titles:
        changes, arguments = STOPS[title]
        config = small_model().replace(**changes)
        loss, gradients, program = verify.loss_and_gradients(Model.on(config, mesh.make(config)), parameters, batch)

        differences = verify.compare_loss_and_gradients(expected, (loss, gradients))
        sent = program_collectives.total_by_kind(
            program_collectives.parse_collectives(program), config.parallel.mesh_shape
        )
        yield Stop(title, arguments, config, memory.predict_bytes(config), sent, differences)
