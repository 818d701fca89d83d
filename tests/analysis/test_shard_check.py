"""`verify_function` names the mistakes of a user's shard function in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardformer
from shardformer.errors import UsageError

MESHES = [{"dp": 2, "mp": 4}, {"dp": 1, "mp": 2}]
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(size=(4, 6)).astype(np.float32)}
PARAMETERS = {"up": DRAW.normal(size=(6, 8)).astype(np.float32), "down": DRAW.normal(size=(8, 6)).astype(np.float32)}
IN_SPECS = {"up": P(None, "mp"), "down": P("mp", None)}, P("dp")


def dense(parameters, batch):
    return jnp.square(jnp.tanh(batch["x"] @ parameters["up"]) @ parameters["down"]).mean()


def with_sum(total):
    def on_shard(parameters, batch):
        y = total(jnp.tanh(batch["x"] @ parameters["up"]) @ parameters["down"])
        return lax.pmean(jnp.square(y).mean(), "dp")

    return on_shard


def verify(function, meshes=MESHES):
    return shardformer.verify_function(function, dense, (PARAMETERS, BATCH), IN_SPECS, P(), meshes)


def test_too_few_devices_are_named():
    with pytest.raises(UsageError, match=r"needs 1024 devices, got \d+; for CPU devices, set XLA_FLAGS=.*count=1024"):
        verify(with_sum(lambda y: y), [{"dp": 2, "mp": 512}])


@jax.custom_vjp
def sum_with_doubled_gradient(x):
    return lax.psum(x, "mp")


sum_with_doubled_gradient.defvjp(
    lambda x: (sum_with_doubled_gradient(x), None), lambda _, gradient: (2 * lax.psum(gradient, "mp"),)
)


def test_right_function_has_no_sentence():
    assert verify(with_sum(lambda y: lax.psum(y, "mp"))) == []


def test_missing_psum_is_seen_on_both_meshes():
    sentences = verify(with_sum(lambda y: y))
    assert [sentence.partition(":")[0] for sentence in sentences] == ["on the mesh dp=2 mp=4", "on the mesh dp=1 mp=2"]


def test_wrong_gradient_behind_a_right_loss_is_named():
    (up, down) = verify(with_sum(sum_with_doubled_gradient), MESHES[1:])
    assert "the gradient of `" in up
    assert "the gradient of `" in down


def test_result_of_blocks_is_compared_by_device():
    def on_shard(x):
        return {"own": x, "all": lax.psum(x, "dp")}

    def sum_and_keep(x):
        return {"own": x, "all": x[:4] + x[4:]}

    x = np.arange(8, dtype=np.float32)
    specs = {"own": P("dp"), "all": P()}
    assert shardformer.verify_function(on_shard, sum_and_keep, (x,), (P("dp"),), specs, [{"dp": 2}]) == []
    wrong = {"own": P("dp"), "all": P("dp")}
    (sentence,) = shardformer.verify_function(on_shard, sum_and_keep, (x,), (P("dp"),), wrong, [{"dp": 2}])
    assert "`all` has shape [4] on each device; expected the block [2] of [4]" in sentence
