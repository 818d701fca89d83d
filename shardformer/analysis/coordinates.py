"""`coordinates`: how far the first steps move the logits of models of several sizes, the coordinate check of muP.

A rate carries over from one size to another if the same steps move the logits as far at both.
"""

import dataclasses

import jax
import jax.numpy as jnp

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.model.decoding import Decoder
from shardformer.tables import format_table
from shardformer.training.trainer import Trainer

SCALED = ("heads", "kv_heads", "d_ff", "kv_latent", "q_latent", "expert_width", "shared_width")  # with the width


@dataclasses.dataclass(frozen=True)
class Movement:
    """How far the logits of one size are from the first ones after each step, as root mean squares."""

    size: int
    changes: list[float]


def resize(config: Config, name: str, size: int) -> Config:
    """Returns a model with another d_model or number of layers; a wider one has more heads of the same size."""
    if name == "layers":
        return config.replace(layers=size)
    scaled = {key: value for key in SCALED if (value := config.get(key))}
    if wrong := [f"{key}={value}" for key, value in scaled.items() if value * size % config.model.d_model]:
        raise UsageError(
            f"d_model={size} would need a fraction of {' '.join(wrong)} of d_model={config.model.d_model}; give "
            "other widths, or keys that divide"
        )
    return config.replace(d_model=size, **{key: value * size // config.model.d_model for key, value in scaled.items()})


def measure(config: Config, size: int, steps: int) -> Movement:
    """Returns the movement of a model of this size on one batch of random tokens."""
    trainer = Trainer(config, mesh.make(config))
    batch, state, decoder = trainer.model.make_batch(), trainer.init(), Decoder(trainer.model)
    logits = jax.jit(lambda params: decoder.logits(params, batch["tokens"])[..., : config.model.vocab])
    before, changes = logits(state.params), []
    for step in range(steps):
        state, _ = trainer.step(state, batch, step)
        changes.append(float(jnp.sqrt(jnp.mean(jnp.square(logits(state.params) - before)))))
    return Movement(size, changes)


def format_movements(name: str, movements: list[Movement]) -> str:
    """Returns a table with a row for each size, and the ratio of the last changes."""
    steps = range(1, len(movements[0].changes) + 1)
    rows = [[m.size, *(f"{change:.4f}" for change in m.changes)] for m in movements]
    last = [m.changes[-1] for m in movements]
    table = format_table(rows, [name, *(f"step {step}" for step in steps)])
    if not min(last):
        return f"{table}\nthe last step changed nothing"
    return f"{table}\nafter the last step, the largest change is {max(last) / min(last):.2f} times the smallest"
