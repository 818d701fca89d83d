"""Proves a configuration's program right: on its mesh, on one device and in the dense reference, in float64.

No device takes part, so the mesh may be any. What differs by more than rounding, by 1e-10, is a mistake.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.adapters.adapter_keys import select_trainable
from shardformer.analysis import dense_reference, traced
from shardformer.analysis.shard_runs import name_path
from shardformer.analysis.verify import Difference, measure_difference, on_one_device
from shardformer.config import Config
from shardformer.config.names import ROUTER_BIAS
from shardformer.errors import RunError
from shardformer.layout import resolve
from shardformer.model.task_on_mesh import choose_task
from shardformer.training.trainer import Trainer

BOUND = 1e-10
STEPS = 3
PARTS = ("gradients on the mesh", "gradients on one device", "gradients of the dense reference",
         f"{STEPS} steps on the mesh", f"{STEPS} steps on one device")  # fmt: skip
# Gradients are compared relative to their RMS, but at least to this share of the RMS of all: what is 0 by mathematics,
# as k's bias without rotary, is noise of 1e-15. So errors below BOUND * LEAST_RMS of all gradients' RMS are not seen.
LEAST_RMS = 1e-2
SPREAD = 0.3  # of parameters: so that softmaxes, norms and activations are far from linear


class Result(NamedTuple):
    """The loss and the gradients of a batch, and the run that computed them."""

    loss: np.ndarray
    gradients: Any
    run: exact.Run


def verify_exactly(config: Config, memory: float = 8e9, begin: Callable[[str], None] = lambda part: None) -> list:
    """Compares the loss, the gradients and three steps on the config's mesh with those of one device.

    Compares with the dense reference too, if the objective is to predict tokens and the weights are floats. Returns
    `Difference`s; raises RunError for a program that JAX cannot trace, with the line that is wrong.

    Arguments:
        memory: the bytes that arrays may take.
        begin: is called with the name of each of the PARTS.
    """
    sharded, single = make_trainer(config), make_trainer(on_one_device(config))
    params, batch, key = draw_parameters(config), draw_batch(sharded), draw_key(config)
    begin(PARTS[0])
    try:
        got = compute_gradients(sharded, params, batch, key, memory=memory)
    except (ValueError, TypeError) as error:  # raised by JAX for sums over devices that are missing or doubled
        raise RunError(explain(config, error)) from None
    begin(PARTS[1])
    rows = compare(got, compute_gradients(single, params, batch, key, memory=memory), "one device")
    begin(PARTS[2])
    if has_dense_reference(config):
        in_float32 = config.replace(dtype="float32", param_dtype="float32", grad_dtype="float32")
        if in_float32 != config:  # a constant of a bfloat16 program is rounded to it
            got = compute_gradients(traced.make_trainer(in_float32), params, batch, key, memory=memory)
        rows += compare(got, compute_dense(in_float32, params, batch, key, memory=memory), "dense")
    begin(PARTS[3])
    after = run_steps(sharded, params, [batch] * STEPS, memory=memory)
    begin(PARTS[4])
    of_one = run_steps(single, params, [batch] * STEPS, memory=memory)
    return [*rows, *compare_states(after, of_one), *find_wrong_metrics(sharded.model.details, after[1], of_one[1])]


def make_trainer(config: Config) -> Trainer:
    """Returns a trainer without devices, whose gradient is traced once for its own program and for that of a step."""
    trainer = traced.make_trainer(config)
    trainer.model.loss_and_grad = jax.jit(trainer.model.loss_and_grad, inline=True)  # type: ignore[method-assign]
    return trainer


def has_dense_reference(config: Config) -> bool:
    """Returns whether the dense reference computes this configuration."""
    known = not dense_reference.find_missing(config)
    return known and config.objective.has_dense_reference and not config.stored.quantized


def compute_gradients(trainer: Trainer, params, batch, key, **options) -> Result:
    """Returns the loss and the gradients of a trainer's program on its mesh."""
    model = trainer.model
    key_shape = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=model.sharding(P()))  # as in a step
    shapes = trainer.abstract.params, describe(batch) | model.constant_shapes(), key_shape
    run = exact.run(model.loss_and_grad, store(trainer, params), batch, key, shapes=shapes, **options)
    losses, gradients = run.outputs
    return Result(losses.loss, gradients, run)


def compute_dense(config: Config, params, batch, key, **options) -> Result:
    """Returns the loss and the gradients of the dense reference."""
    compute = functools.partial(dense_reference.losses_and_gradients, config)
    run = exact.run(compute, params, batch, key, **options)
    (nats, _), gradients = run.outputs
    return Result(nats, select_trainable(gradients, config), run)


def run_steps(trainer: Trainer, params, batches: Sequence[dict], **options) -> tuple[Any, list[np.ndarray]]:
    """Returns the training state and the metrics after a full step with each batch."""
    batch = batches[0]
    state = exact.run(trainer.update.start, store(trainer, params), shapes=(trainer.model.shapes,)).outputs
    if trainer.model.batch_is_stored:
        state = state._replace(rollout=batch)
    shapes = trainer.abstract, describe(batch) | trainer.model.constant_shapes(), describe(np.int32(0))
    program = jax.make_jaxpr(trainer.accumulation.step, return_shape=True)
    closed, outputs = program(*shapes)
    tree, rows = jax.tree.structure(outputs), []
    for step, batch in enumerate(batches):
        run = exact.run_jaxpr(closed, jax.tree.leaves((state, batch, np.int32(step))), **options)
        state, metrics = jax.tree.unflatten(tree, run.outputs)
        rows.append(metrics)
    return state, rows


def compare(got: Result, expected: Result, with_what: str) -> list[Difference]:
    """Compares the losses and the gradients; returns the worst gradient first."""
    leaves = jax.tree.leaves_with_path(expected.gradients)
    size = sum(np.size(leaf) for _, leaf in leaves)
    rms = np.sqrt(sum(np.square(leaf).sum() for _, leaf in leaves) / size)
    rows = []
    for (path, want), leaf in zip(leaves, jax.tree.leaves(got.gradients), strict=True):
        least = LEAST_RMS * rms * np.sqrt(np.size(want))
        difference = measure_difference(leaf, want, least)
        rows.append(Difference(f"gradient of {name_path(path)}", difference, BOUND, with_what))
    loss = Difference("loss", measure_difference(got.loss, expected.loss), BOUND, with_what)
    return [loss, *sorted(rows, key=lambda row: (row.passes, -row.relative))]


def find_wrong_metrics(names: tuple[str, ...], got: list, expected: list) -> list[Difference]:
    """Returns a row for each further metric of a task that differs, such as a root of a mean over one shard's rows."""
    rows = []
    for index, name in enumerate(names, start=-len(names)):
        column, wanted = (np.array([row[index] for row in metrics]) for metrics in (got, expected))
        difference = measure_difference(column, wanted)
        rows.append(Difference(f"metric {name}, a mean over shards", difference, BOUND, "one device"))
    return [row for row in rows if not row.passes]


def compare_states(got: tuple, expected: tuple) -> list[Difference]:
    """Compares training states, and the metrics of the steps that led to them."""
    after = f"after {STEPS} steps"
    (state, metrics), (single, metrics_of_one) = got, expected
    rows = [Difference(f"metrics of {STEPS} steps", measure_difference(metrics, metrics_of_one), BOUND, "one device")]
    for name in ("params", "average", "masters"):
        for (path, want), leaf in zip(
            jax.tree.leaves_with_path(getattr(single, name)), jax.tree.leaves(getattr(state, name)), strict=True
        ):
            difference = measure_difference(leaf, want) if want.dtype.kind == "f" else float((leaf != want).any())
            rows.append(Difference(f"{name} {name_path(path)} {after}", difference, BOUND, "one device"))
    return [rows[0], *sorted(rows[1:], key=lambda row: (row.passes, -row.relative))]


# What a program computes with


def draw_parameters(config: Config) -> dict:
    """Returns random float parameters: of scales around 1, and of all others a normal draw.

    With experts, all tokens share a direction from which the first expert of each layer turns away, so that it has no
    tokens; and the routers' biases count.
    """
    draw = np.random.default_rng(config.training.seed)

    def draw_leaf(path, shape):
        centre = float(path[-1].key.endswith("scale"))
        return (centre + SPREAD * draw.standard_normal(shape.shape)).astype(np.float32)

    params = jax.tree.map_with_path(draw_leaf, choose_task(config).abstract_parameters(config))
    if config.experts.experts:
        layers, embed = params["transformer/layers"], params["transformer/embed"]
        signs = np.resize(np.array([1, -1], np.float32), config.model.table_size)
        embed["tokens"] += 2 * SPREAD * signs
        layers["router"][:, :, 0] = -np.sign(signs @ embed["project"]) if "project" in embed else -signs
        if ROUTER_BIAS in layers:
            layers[ROUTER_BIAS] /= 10 * config.experts.experts
    return params


def store(trainer: Trainer, params: dict) -> dict:
    """Returns the parameters in the form in which the trainer's model stores them."""
    weights = resolve(trainer.config).weights
    return exact.run(weights.store, params).outputs if trainer.config.stored.quantized else params


def draw_batch(trainer: Trainer) -> dict[str, np.ndarray]:
    """Returns a random batch of the shapes that the trainer's objective learns from.

    Each row has another share of masked targets, so that a mean of the means of shards or microbatches is wrong.
    """
    config, shapes = trainer.config, trainer.model.batch_shapes()
    if not config.objective.reads_tokens:
        return trainer.model.make_batch()
    draw = np.random.default_rng([config.training.seed, 1])
    share = np.linspace(0.2, 1, config.training.batch)
    if config.objective.has_plain_batches:
        shapes["weights"] = jax.ShapeDtypeStruct(shapes["tokens"].shape, np.float32)
        if config.data.documents == "masked":
            shapes["documents"] = shapes["tokens"]
    batch = {}
    for name, shape in shapes.items():
        if name == "documents":
            batch[name] = np.minimum(np.cumsum(draw.random(shape.shape) < 0.2, -1), MOST_DOCUMENTS).astype(np.int32)
        elif np.issubdtype(shape.dtype, np.integer):
            batch[name] = draw.integers(0, config.model.vocab, shape.shape, np.int32)
        elif name in MASKS:
            chosen = draw.random(shape.shape) < share.reshape(-1, *[1] * (len(shape.shape) - 1))
            chosen[-1] = True
            batch[name] = chosen.astype(np.float32)
        else:
            batch[name] = draw.normal(find_centre(name, config), 0.5, shape.shape).astype(np.float32)
    return batch | {name: draw_constants(leaf, draw) for name, leaf in trainer.model.constant_shapes().items()}


MASKS = ("weights", "scored", "pairs", "kl_scored", "kl_pairs", "sft")
MOST_DOCUMENTS = 3


def find_centre(name: str, config: Config) -> float:
    """Returns the mean of an array, with which ratios are about 1, and the divergence that KTO needs is above 0."""
    of_token = -math.log(config.model.vocab)
    if name in ("advantages", "rewards"):
        return 0
    answers = {"references": 0.6, "kl_references": 1.2} if config.objective.reads_pairs else {}
    return of_token * config.model.seq * answers[name] if name in answers else of_token


def draw_constants(shapes, draw: np.random.Generator):
    """Returns a random teacher."""
    return jax.tree.map(lambda leaf: (SPREAD * draw.standard_normal(leaf.shape)).astype(np.float32), shapes)


def draw_key(config: Config) -> np.ndarray:
    """Returns the data of a dropout key."""
    return np.random.default_rng([config.training.seed, 2]).integers(0, 2**32, 2, np.uint32)


def describe(tree):
    """Returns the shapes and dtypes of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)


# Where a program is wrong


def explain(config: Config, error: Exception | None = None) -> str:
    """Returns the line where a sum over devices is missing or one too many, and JAX's reason to reject the program.

    Without the types of shard_map, the loss can be computed all the same, and each line be tried with another sum.
    """
    repair = find_repair(config)
    found = f"{repair}. With this repaired, the loss is that of one device" if repair else ""
    if error is None:
        return found
    rejected = f"JAX rejects {exact.find_error_line(error)}: {' '.join(str(error).split())[:300]}"
    return f"the sharded model is wrong: {found}. {rejected}" if found else f"the sharded model is wrong: {rejected}"


def find_repair(config: Config) -> exact.Repair | None:
    """Returns the change of one sum over devices that makes the loss right; None if it is right, or none does."""
    sharded, single = traced.make_trainer(config), traced.make_trainer(on_one_device(config))
    params, batch, key = draw_parameters(config), draw_batch(sharded), draw_key(config)
    model = sharded.model
    model.check_types = False

    def compute_loss(params, batch, key):
        return model.evaluate(params, batch, key)[1].loss

    def is_right(run: exact.Run) -> bool:
        return measure_difference(run.outputs[0], expected) <= BOUND

    try:
        closed = jax.make_jaxpr(compute_loss)(model.shapes, describe(batch) | model.constant_shapes(), describe(key))
    except (ValueError, TypeError):
        return None
    expected = compute_gradients(single, params, batch, key).loss
    leaves = jax.tree.leaves((store(sharded, params), batch, key))
    if is_right(exact.run_jaxpr(closed, leaves)):
        return None
    return exact.find_repair(closed, leaves, is_right)


def use_no_accelerator() -> None:
    """Keeps JAX from starting an accelerator for the few constants of a trace."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
