"""A classifier of drawn digits: a perceptron whose hidden units are split over `mp`, in plain Haiku.

    python -m shardformer train task=scripts/examples/digits.py:Digits mesh=4x2 zero=3 batch=64 steps=200 lr=0.03

It classifies 94% of new digits after 200 steps.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer import Task

SIDE, HIDDEN = 8, 64
# Five rows of three dots for each digit, a row in octal.
FONT = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")


def draw_digits(seed: int, count: int) -> dict[str, np.ndarray]:
    """Returns noisy images [count, SIDE, SIDE] of digits at random positions, and their labels [count]."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count)
    images = random.normal(0, 0.2, (count, SIDE, SIDE))
    for image, label in zip(images, labels, strict=True):
        dots = [[int(row) >> 2 & 1, int(row) >> 1 & 1, int(row) & 1] for row in FONT[label]]
        top, left = random.integers(0, 2, 2)
        image[top : top + 5, left : left + 3] += np.array(dots)
    return {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}


class Digits(Task):
    """The loss and the accuracy of a perceptron on drawn digits."""

    def rows(self):
        return {
            "images": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32),
            "labels": jax.ShapeDtypeStruct((), jnp.int32),
        }

    def batches(self, first_step, count):
        step = first_step
        while True:
            yield draw_digits(step, count)
            step += 1

    def validation(self, count):
        return [draw_digits(1_000_000 + i, count) for i in range(4)]

    def loss(self, batch):
        hidden = HIDDEN // lax.axis_size("mp")  # this shard's units: `up` has its columns of them, `down` its rows
        x = batch["images"].reshape(-1, SIDE * SIDE)
        up = hk.get_parameter("up", [SIDE * SIDE, hidden], init=hk.initializers.RandomNormal(SIDE**-1))
        up_bias = hk.get_parameter("up_bias", [hidden], init=jnp.zeros)
        down = hk.get_parameter("down", [hidden, 10], init=hk.initializers.RandomNormal(HIDDEN**-0.5))
        bias = hk.get_parameter("bias", [10], init=jnp.zeros)  # replicated, so it is added once, after the sum
        logits = lax.psum(jax.nn.relu(x @ up + up_bias) @ down, "mp") + bias
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], axis=1)
        return nats.mean(), {"accuracy": (logits.argmax(-1) == batch["labels"]).mean()}
