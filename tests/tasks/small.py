"""A multilayer perceptron in plain Haiku, of which each shard of mp has some hidden units."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer import Task


class Perceptron(Task):
    """Finds the largest of three numbers."""

    def rows(self):
        return {"x": jax.ShapeDtypeStruct((8,), "float32"), "y": jax.ShapeDtypeStruct((), "int32")}

    def batches(self, first_step, count):
        while True:
            x = np.random.default_rng([7, first_step]).normal(size=(count, 8)).astype(np.float32)
            yield {"x": x, "y": x[:, :3].argmax(1).astype(np.int32)}
            first_step += 1

    def validation(self, count):
        return [next(self.batches(10**6, count))]

    def loss(self, batch):
        hidden, normal = 16 // lax.axis_size("mp"), hk.initializers.RandomNormal(0.3)
        x = jax.nn.relu(batch["x"] @ hk.get_parameter("up", [8, hidden], init=normal))
        logits = self.join(x @ hk.get_parameter("down", [hidden, 3], init=normal))
        logits += hk.get_parameter("bias", [3], init=jnp.zeros)
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)
        return nats.mean(), self.measure(batch, logits)

    def join(self, parts):
        return lax.psum(parts, "mp")

    def measure(self, batch, logits):
        return {"accuracy": (logits.argmax(-1) == batch["y"]).mean(), "largest": jnp.abs(logits).max(-1).mean()}


class WithoutValidation(Perceptron):
    """The same without held-out data."""

    def validation(self, count):
        return []
