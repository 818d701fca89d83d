r"""An encoder that fills in masked tokens: its heads and its feed-forward units are split over `mp`.

    python -m shardformer train task=scripts/examples/masked_tokens.py:MaskedTokens mesh=2x4 \
        zero=3 batch=64 steps=250 lr=0.003

A row is a random half and its mirror image, with masked tokens in one of them. The encoder must learn to look at the
other: it names 95% of the masked tokens after 250 steps, where guessing names 6%.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer import Task
from shardformer.collectives import fan_out

TOKENS, LENGTH, WIDTH, HEADS, UNITS, LAYERS = 16, 12, 32, 4, 64, 2
MASK, MASKED = TOKENS, 3  # the id of a masked token, and their number in a row


def draw_rows(seed: int, count: int) -> dict[str, np.ndarray]:
    """Returns masked rows [count, LENGTH], the positions of their masks and the tokens that were there."""
    random = np.random.default_rng(seed)
    half = random.integers(0, TOKENS, (count, LENGTH // 2))
    rows = np.concatenate([half, half[:, ::-1]], axis=1)
    order = random.permuted(np.tile(np.arange(LENGTH // 2), (count, 1)), axis=1)[:, :MASKED]
    positions = order + random.integers(0, 2, (count, 1)) * (LENGTH // 2)
    hidden = np.take_along_axis(rows, positions, axis=1)
    np.put_along_axis(rows, positions, MASK, axis=1)
    return {name: x.astype(np.int32) for name, x in (("rows", rows), ("positions", positions), ("hidden", hidden))}


class Layer(hk.Module):
    """Attention in both directions, then a feed-forward; each shard has its heads and its units."""

    def __call__(self, x):
        heads, units, size = HEADS // lax.axis_size("mp"), UNITS // lax.axis_size("mp"), WIDTH // HEADS
        inner = hk.initializers.RandomNormal(WIDTH**-0.5)
        y = fan_out(hk.LayerNorm(-1, True, True, name="before_attention")(x))
        q, k, v = (jnp.einsum("btd,dhk->bthk", y, hk.get_parameter(n, [WIDTH, heads, size], init=inner)) for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) * size**-0.5)
        out = hk.get_parameter("out", [heads, size, WIDTH], init=inner)
        x += lax.psum(jnp.einsum("bhts,bshk,hkd->btd", weights, v, out), "mp")
        y = fan_out(hk.LayerNorm(-1, True, True, name="before_units")(x))
        up = hk.get_parameter("up", [WIDTH, units], init=inner)
        down = hk.get_parameter("down", [units, WIDTH], init=hk.initializers.RandomNormal(UNITS**-0.5))
        return x + lax.psum(jax.nn.gelu(y @ up) @ down, "mp")


class MaskedTokens(Task):
    """The loss and the accuracy of the tokens behind the masks."""

    def rows(self):
        sizes = {"rows": LENGTH, "positions": MASKED, "hidden": MASKED}
        return {name: jax.ShapeDtypeStruct((size,), jnp.int32) for name, size in sizes.items()}

    def batches(self, first_step, count):
        step = first_step
        while True:
            yield draw_rows(step, count)
            step += 1

    def validation(self, count):
        return [draw_rows(1_000_000 + i, count) for i in range(4)]

    def loss(self, batch):
        table = hk.get_parameter("tokens", [TOKENS + 1, WIDTH], init=hk.initializers.RandomNormal(1.0))
        places = hk.get_parameter("places", [LENGTH, WIDTH], init=hk.initializers.RandomNormal(1.0))
        x = table[batch["rows"]] + places
        for i in range(LAYERS):
            x = Layer(name=f"layer_{i}")(x)
        masked = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        logits = hk.LayerNorm(-1, True, True)(masked) @ table[:TOKENS].T
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["hidden"][..., None], axis=-1)
        return nats.mean(), {"accuracy": (logits.argmax(-1) == batch["hidden"]).mean()}
