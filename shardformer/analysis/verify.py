"""Compares sharded training with a dense reference: losses, gradients and ten steps must agree."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.adapters.adapter_keys import replace_trainable, select_trainable
from shardformer.analysis import dense_reference
from shardformer.analysis.shard_runs import name_path
from shardformer.config import Config
from shardformer.config.names import ROUTER_BIAS
from shardformer.devices import processes
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.model import Loss, Model
from shardformer.model.random_tokens import draw_tokens
from shardformer.optim import lbfgs
from shardformer.tables import format_count, format_table
from shardformer.training.step import TrainState
from shardformer.training.trainer import Trainer

LOSS, GRADIENT, TRAINING = 1e-6, 1e-5, 1e-4  # largest relative differences in float32
STEPS = 10
ZERO_GRADIENT = 1e-4  # of all gradients' RMS: smaller ones are rounding noise, as of k's bias without rotary
NO_KEY = np.zeros(2, np.uint32)  # the data of a dropout key


class Difference(NamedTuple):
    """The relative difference of one result from that of another program."""

    name: str
    relative: float
    allowed: float
    expected: str = "dense"  # the program that has the right result

    @property
    def passes(self) -> bool:
        return self.relative <= self.allowed  # false for NaN


def compare_loss_and_gradients(dense: tuple, sharded: tuple) -> list[Difference]:
    """Compares (loss, gradients), trees of host arrays; returns the worst gradient first, the loss last."""
    expected = jax.tree.leaves_with_path(dense[1])
    rms = np.sqrt(sum(np.square(want, dtype=np.float64).sum() for _, want in expected) / _size(expected))
    rows = []
    for (path, want), got in zip(expected, jax.tree.leaves(sharded[1]), strict=True):
        least = ZERO_GRADIENT * rms * np.sqrt(np.size(want))
        rows.append(Difference(name_path(path), measure_difference(got, want, least), GRADIENT))
    loss = Difference("loss", measure_difference(sharded[0], dense[0]), LOSS)
    return [*sorted(rows, key=lambda row: (row.passes, -row.relative)), loss]


def compare_functions(
    dense: Callable, sharded: Callable, parameters: Any, specs: Any, batch: Any, batch_specs: Any,
    device_mesh: Mesh | AbstractMesh, check_vma: bool = True,
) -> list[Difference]:  # fmt: skip
    """Compares the loss and the gradients of `sharded(parameters, batch)` under shard_map with those of `dense`.

    Both return the mean loss. `specs` and `batch_specs` are trees of PartitionSpecs. No device takes part.
    """
    in_specs = (specs, batch_specs)
    mapped = jax.shard_map(sharded, mesh=device_mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)
    expected = exact.run(jax.value_and_grad(dense), parameters, batch).outputs
    got = exact.run(jax.value_and_grad(mapped), parameters, batch).outputs
    return compare_loss_and_gradients(expected, got)


def verify_config(config: Config) -> list[Difference]:
    """Compares this package's model and trainer on the config's mesh with the dense reference on one device.

    Compares the loss, each gradient and the losses of ten steps, in float32, with masked targets and with the config's
    dropout, microbatches and packed documents.
    """
    config = config.replace(dtype="float32", param_dtype="float32", grad_dtype="float32")
    if not config.objective.reads_tokens:
        return _verify_task(config)
    batch = weighted_batch(config)
    with jax.default_matmul_precision("highest"):
        dense, sharded = make_dense_trainer(config), Trainer(config, mesh.make(config))
        parameters = draw_parameters(dense)
        key = np.asarray(dense.dropout_key(0))
        expected = reference_loss_and_gradients(config, parameters, batch, key)
        got = loss_and_gradients(sharded.model, parameters, batch, key)[:2]
        losses = _train_reference(dense, batch), train(sharded, batch)
    rows = compare_loss_and_gradients(expected, got)
    return [*rows, Difference(f"losses of {STEPS} steps", find_worst(*losses), TRAINING)]


def _verify_task(config: Config) -> list[Difference]:
    """Compares a user's task on the config's mesh with the same task on one device: it has no dense reference."""
    with jax.default_matmul_precision("highest"):
        single, sharded = make_dense_trainer(config), Trainer(config, mesh.make(config))
        batch, parameters = sharded.model.make_batch(), jax.tree.map(np.array, single.model.init(config.training.seed))
        results = [loss_and_gradients(t.model, parameters, batch, single.dropout_key(0))[:2] for t in (single, sharded)]
        worst = find_worst(train(single, batch), train(sharded, batch))
    rows = [*compare_loss_and_gradients(*results), Difference(f"losses of {STEPS} steps", worst, TRAINING)]
    return [row._replace(expected="one device") for row in rows]


def draw_parameters(dense: Trainer) -> Any:
    """Returns initial parameters as host arrays; with experts, one has no tokens, and the routers' biases count."""
    config, parameters = dense.config, jax.tree.map(np.array, dense.model.init(dense.config.training.seed))
    if not config.experts.experts:
        return parameters
    draw, layers = np.random.default_rng([config.training.seed, 2]), parameters["transformer/layers"]
    # All tokens share a direction from which the first expert of each layer turns away.
    tokens = parameters["transformer/embed"]["tokens"]
    signs = np.resize(np.array([1, -1], np.float32), config.model.d_model)
    tokens += 2 * tokens.std() * signs
    layers["router"][:, :, 0] = -signs
    if config.experts.balance_rate:
        biases = draw.normal(size=layers[ROUTER_BIAS].shape) / (10 * config.experts.experts)
        layers[ROUTER_BIAS] = biases.astype(np.float32)
    return parameters


def find_worst(dense, sharded) -> float:
    """Returns the largest relative difference; NaN if there is one, which max() would ignore."""
    return float(np.max([measure_difference(got, want) for got, want in zip(sharded, dense, strict=True)]))


def loss_and_gradients(model: Model, parameters, batch, dropout_key=None) -> tuple[np.ndarray, Any, str]:
    """Returns (loss, gradients, the compiled program's text) of the package on the model's mesh."""
    key = NO_KEY if dropout_key is None else dropout_key
    shardings = model.shardings, model.sharding(model.row_spec), model.sharding(P())
    placed = jax.device_put((parameters, batch, key), shardings)
    compiled = jax.jit(model.loss_and_grad).lower(*placed).compile()
    losses, gradients = compiled(*placed)
    return processes.gather_arrays(losses.loss), processes.gather_arrays(gradients), compiled.as_text() or ""


def reference_loss_and_gradients(config: Config, parameters, batch, dropout_key=None) -> tuple[np.ndarray, Any]:
    """Returns (loss, gradients) of the dense reference on one device; with LoRA, the adapters' gradients."""
    if missing := dense_reference.find_missing(config):
        raise UsageError(
            f"the dense reference has no {missing}: write it in analysis/dense_reference.py, or give exact=true, which "
            "compares with one device"
        )
    key = NO_KEY if dropout_key is None else dropout_key
    compute = jax.jit(functools.partial(dense_reference.losses_and_gradients, config))
    (nats, _), gradients = compute(parameters, batch, key)
    return np.asarray(nats), jax.tree.map(np.asarray, select_trainable(gradients, config))


def train(trainer: Trainer, batch) -> list[np.ndarray]:
    """Returns the losses of STEPS steps with the same batch."""
    state, losses = trainer.init(), []
    for step in range(STEPS):
        state, metrics = trainer.step(state, batch, step)
        losses.append(np.array(trainer.read_metrics(metrics).loss, np.float32))
    return losses


def on_one_device(config: Config) -> Config:
    """Returns the configuration of the same training on one device, without microbatches."""
    return config.replace(
        mesh="1x1", zero=0, accum=1, accum_mode="scan", pipeline_rounds=1, sequence_parallel=False, attention="auto"
    )


def make_dense_trainer(config: Config) -> Trainer:
    """Returns a trainer on one device, without microbatches: it provides initial parameters and the optimizer."""
    one = on_one_device(config)
    return Trainer(one, mesh.arrange(one, jax.local_devices()[:1], follow_wires=False))


def _train_reference(trainer: Trainer, batch) -> list[np.ndarray]:
    """Returns the losses of STEPS steps of the optimizer on the reference's gradients."""
    config = trainer.config

    def evaluate(params, key):
        (nats, squares), gradients = dense_reference.losses_and_gradients(config, params, batch, key)
        return Loss(nats, squares, jnp.zeros_like(nats)), select_trainable(gradients, config)

    def run(state: TrainState, step):
        key = trainer.dropout_key(state.step)
        losses, gradients = evaluate(state.params, key)

        def objective(trainable):
            params = replace_trainable(state.params, trainable)
            masks = dense_reference.make_masks(config, key, np.arange(config.training.batch))
            return dense_reference.loss(config, params, **batch, masks=masks)[1]

        arguments = lbfgs.search_arguments(objective, losses, gradients, config)
        return trainer.update.apply(state, losses, gradients, step, **arguments)

    program = jax.jit(run, donate_argnums=0, out_shardings=(trainer.shardings, None))
    state, losses = trainer.init(), []
    for step in range(STEPS):
        state, metrics = program(state, np.int32(step))
        losses.append(np.asarray(metrics.loss))
    return losses


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens; raises UsageError for an objective without a dense reference."""
    if not config.objective.has_dense_reference:
        raise UsageError(
            f"objective={config.objective.name} has no dense reference; give objective=lm, or give verify exact=true, "
            "which compares with one device"
        )
    return draw_tokens(config)


def weighted_batch(config: Config) -> dict[str, np.ndarray]:
    """Returns a random batch with masked targets, and with documents if the config masks them.

    Each row has another share of masked targets, so that a mean of the means of shards or microbatches is wrong.
    """
    draw = np.random.default_rng([config.training.seed, 1])
    shape = config.training.batch, config.model.seq
    shares = np.linspace(0.1, 1, config.training.batch)[:, None]
    weights = (draw.random(shape) < shares).astype(np.float32)
    weights[-1] = 1
    batch = random_batch(config) | {"weights": weights}
    if config.data.documents == "masked":
        batch["documents"] = np.cumsum(draw.random(shape) < 0.2, axis=1).astype(np.int32)
    return batch


def format_differences(rows: list[Difference], most: int = 8) -> str:
    """Returns a table with the worst first, and a verdict."""
    printed = [
        [row.name, row.expected, f"{row.relative:.1e}", f"{row.allowed:.0e}", "yes" if row.passes else "NO"]
        for row in sorted(rows, key=lambda row: (row.passes, -row.relative))
    ]
    always = ("loss", "metrics")  # of the step, and of further steps
    listed = printed[:most] + [row for row in printed[most:] if row[-1] == "NO" or row[0].startswith(always)]
    rest = len(printed) - len(listed)
    hidden = f"\n({format_count(rest, 'row')} not listed, with smaller differences)" if rest else ""
    failed = sorted((row for row in rows if not row.passes), key=lambda row: -row.relative)
    others = " and ".join(dict.fromkeys(row.expected for row in rows))
    verdict = f"sharded and dense differ; the worst is {failed[0].name}" if failed else f"sharded equals {others}"
    table = format_table(listed, ["compared", "with", "relative difference", "allowed", "passes"])
    return f"{table}{hidden}\n{verdict}"


def _size(leaves) -> int:
    return sum(np.size(leaf) for _, leaf in leaves)


def measure_difference(got, want, least: float = 0.0) -> float:
    """Returns the norm of the difference relative to the norm of `want`, or to `least` if that is larger."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return float("inf")
    same = got == want  # infinities too
    scale = max(float(np.linalg.norm(want[np.isfinite(want)])), least)
    return float(np.linalg.norm(got[~same] - want[~same])) / (scale or 1.0)
