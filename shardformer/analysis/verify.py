"""Sharded against dense: the same parameters and the same batch must give the same loss, gradients and training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.kernels.threefry import STANDARD
from shardformer.model import Model
from shardformer.parallel import mesh
from shardformer.tables import format_table
from shardformer.training.step import Trainer

LOSS, GRADIENT, TRAINING = 1e-6, 1e-5, 1e-4  # largest relative differences in float32
STEPS = 10


class Difference(NamedTuple):
    """How far one result is from the dense one, relative to it."""

    name: str
    relative: float
    allowed: float

    @property
    def passes(self) -> bool:
        return self.relative <= self.allowed  # NaN does not


def compare_loss_and_gradients(dense: tuple, sharded: tuple) -> list[Difference]:
    """Of (loss, gradients) as trees of host arrays; the worst gradient first, the loss last."""
    leaves = zip(jax.tree.leaves_with_path(dense[1]), jax.tree.leaves(sharded[1]), strict=True)
    rows = [Difference(_name(path), _relative(got, want), GRADIENT) for (path, want), got in leaves]
    loss = Difference("loss", _relative(sharded[0], dense[0]), LOSS)
    return [*sorted(rows, key=lambda row: (row.passes, -row.relative)), loss]


def verify_function(
    dense: Callable, sharded: Callable, parameters: Any, specs: Any, batch: Any, batch_specs: Any,
    device_mesh: Mesh, check_vma: bool = True,
) -> list[Difference]:  # fmt: skip
    """A shard module of one's own: `sharded(parameters, batch)` is traced under shard_map, `dense` on one device.

    Both return the mean loss; `specs` says how each parameter is split, `batch_specs` how the batch is.
    """
    mapped = jax.shard_map(sharded, mesh=device_mesh, in_specs=(specs, batch_specs), out_specs=P(), check_vma=check_vma)
    place = lambda tree, specs: jax.device_put(tree, jax.tree.map(
        lambda spec: NamedSharding(device_mesh, spec), specs, is_leaf=lambda node: isinstance(node, P)
    ))  # fmt: skip
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.value_and_grad(dense))(parameters, batch)
        got = jax.jit(jax.value_and_grad(mapped))(place(parameters, specs), place(batch, batch_specs))
    return compare_loss_and_gradients(_on_host(expected), _on_host(got))


def verify_config(config: Config) -> list[Difference]:
    """This package's model: loss, each gradient and the losses of ten steps, on the config's mesh and on one device."""
    config = config.replace(dtype="float32", param_dtype="float32")
    one = config.replace(mesh="1x1", zero=0)
    batch = random_batch(config)
    with jax.default_matmul_precision("highest"):
        alone = mesh.arrange(one, jax.local_devices()[:1], follow_wires=False)
        dense, sharded = Trainer(one, alone), Trainer(config, mesh.make(config))
        parameters = jax.tree.map(np.asarray, dense.model.init(config.seed))
        found = [loss_and_gradients(t.model, parameters, batch)[:2] for t in (dense, sharded)]
        losses = [train(t, batch) for t in (dense, sharded)]
    rows = compare_loss_and_gradients(*found)
    return [*rows, Difference(f"losses of {STEPS} steps", find_worst(*losses), TRAINING)]


def find_worst(dense, sharded) -> float:
    """The largest relative difference; NaN where there is one, which max() would pass over."""
    return float(np.max([_relative(got, want) for got, want in zip(sharded, dense, strict=True)]))


def loss_and_gradients(model: Model, parameters, batch) -> tuple[np.ndarray, Any, str]:
    """(loss, gradients, the compiled program's text) on the model's mesh, without dropout."""
    key = np.asarray(jax.random.key_data(jax.random.key(0, impl=STANDARD)))
    shardings = model.shardings, model.sharding(model.row_spec), model.sharding(P())
    placed = jax.device_put((parameters, batch, key), shardings)
    compiled = jax.jit(model.loss_and_grad).lower(*placed).compile()
    losses, gradients = compiled(*placed)
    return _on_host(losses.loss), _on_host(gradients), compiled.as_text()


def train(trainer: Trainer, batch) -> list[np.ndarray]:
    state, losses = trainer.init(), []
    for step in range(STEPS):
        state, metrics = trainer.step(state, batch, step)
        losses.append(np.asarray(metrics)[0])
    return losses


def random_batch(config: Config) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(config.seed).integers(0, config.vocab, (config.batch, config.seq + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def format_differences(rows: list[Difference], most: int = 8) -> str:
    """A table with the worst first, and a verdict."""
    shown = [[row.name, f"{row.relative:.1e}", f"{row.allowed:.0e}", "yes" if row.passes else "NO"] for row in rows]
    listed = shown[:most] + [row for row in shown[most:] if row[-1] == "NO" or row[0].startswith("loss")]
    hidden = f"\n({len(shown) - len(listed)} more gradients are closer)" if len(listed) < len(shown) else ""
    failed = [row for row in rows if not row.passes]
    verdict = f"sharded and dense differ; the worst is {failed[0].name}" if failed else "sharded equals dense"
    table = format_table(listed, ["compared with dense", "relative difference", "allowed", "passes"])
    return f"{table}{hidden}\n{verdict}"


def _on_host(tree):
    """Whole arrays, on every process."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(np.asarray, tree)


def _relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    scale = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / (scale or 1.0) if got.shape == want.shape else float("inf")


def _name(path) -> str:
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)
