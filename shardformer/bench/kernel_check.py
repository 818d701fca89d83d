"""`bench kernel`: loss and gradients with this device's attention against plain attention."""

from collections.abc import Mapping

import jax
import numpy as np

from shardformer.analysis.verify import random_batch
from shardformer.bench.bench_options import Measuring
from shardformer.config import Config
from shardformer.errors import RunError
from shardformer.layout import mesh
from shardformer.tables import format_table
from shardformer.training.trainer import Trainer

LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}  # of the relative difference of a gradient
CASES = {"causal": {}, "shared heads": {"kv_heads": 2}, "window": {"window": 256}}


def bench_kernel(
    options: Measuring, settings: Config, cases: Mapping[str, dict] = CASES, limits: Mapping[str, float] = LIMITS
) -> None:
    """Prints the largest differences for each case and dtype; raises RunError if a gradient differs too much."""
    mesh.start(settings)
    rows, wrong = [], []
    for dtype, limit in limits.items():
        for name, changes in cases.items():
            loss, gradient = compare(settings.replace(dtype=dtype, **changes))
            rows.append([name, dtype, f"{loss:.1e}", f"{gradient:.1e}"])
            if not gradient <= limit:
                wrong.append(f"{name} {dtype}: {gradient:.1e} is above {limit:g}")
    print(format_table(rows, ["case", "dtype", "loss", "gradient"]))
    if wrong:
        raise RunError(f"attention differs from plain attention: {'; '.join(wrong)}")


def compare(settings: Config) -> tuple[float, float]:
    """Returns the relative differences of the loss, and of the gradient that differs most."""
    results = [measure(settings.replace(attention=method)) for method in (settings.parallel.attention, "plain")]
    (loss, grads), (plain_loss, plain_grads) = results
    apart = jax.tree.map(_relative, grads, plain_grads)
    return abs(loss - plain_loss) / plain_loss, max(jax.tree.leaves(apart))


def measure(settings: Config) -> tuple[float, dict]:
    """Returns the loss and the gradients of a random batch."""
    trainer = Trainer(settings, mesh.make(settings))
    gradient = jax.jit(trainer.model.loss_and_grad)
    params = trainer.model.init(settings.training.seed)
    losses, grads = gradient(params, trainer.to_devices(random_batch(settings)), trainer.dropout_key(0))
    return float(losses.loss), jax.tree.map(np.asarray, grads)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm((a - b).ravel())) / max(float(np.linalg.norm(b.ravel())), 1e-30)
