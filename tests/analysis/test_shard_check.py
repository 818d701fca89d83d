"""`verify_function` names the mistakes of a user's shard function in words."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardformer

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
    meshes = dict.fromkeys(sentence.partition(":")[0] for sentence in sentences)
    assert list(meshes) == ["on the mesh dp=2 mp=4", "on the mesh dp=1 mp=2"]


def find_number(mark: str) -> int:
    """Returns the number of the line of this file that ends with a mark."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(mark))


def forget_sum(parameters, batch):
    y = jnp.tanh(batch["x"] @ parameters["up"])
    y = y @ parameters["down"]  # forgotten
    return lax.pmean(jnp.square(y).mean(), "dp")


def sum_twice(parameters, batch):
    y = jnp.tanh(batch["x"] @ parameters["up"]) @ parameters["down"]
    y = lax.psum(lax.psum(y, "mp"), "mp")  # doubled
    return lax.pmean(jnp.square(y).mean(), "dp")


def sum_over_other_axis(parameters, batch):
    y = jnp.tanh(batch["x"] @ parameters["up"]) @ parameters["down"]
    y = lax.psum(y, "dp")  # wrong axis
    return lax.pmean(jnp.square(y).mean(), "dp")


@pytest.mark.parametrize(
    ("function", "mark", "repair"),
    [
        (forget_sum, "# forgotten", "a psum over mp is missing after"),
        (sum_twice, "# doubled", "the psum over mp is one too many at"),
        (sum_over_other_axis, "# wrong axis", "the psum is over dp, expected over mp, at"),
    ],
)
def test_line_of_the_wrong_sum_is_named(function, mark, repair):
    sentence = verify(function, [{"dp": 2, "mp": 4}])[-1]
    assert repair in sentence
    assert f"test_shard_check.py:{find_number(mark)} " in sentence


def test_mesh_may_have_more_devices_than_the_machine():
    wide = {"up": np.ones((6, 512), np.float32), "down": np.ones((512, 6), np.float32)}
    arguments = wide, {"x": np.ones((64, 6), np.float32)}
    meshes = [{"dp": 64, "mp": 512}]

    def check(function):
        return shardformer.verify_function(function, dense, arguments, IN_SPECS, P(), meshes)

    assert check(with_sum(lambda y: lax.psum(y, "mp"))) == []
    assert check(forget_sum)


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


def drop(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape[1:]), x, 0)


def drop_by_device(x, key):
    return drop(x, jax.random.fold_in(key, lax.axis_index("dp")))


@pytest.mark.parametrize(("function", "is_right"), [(drop, True), (drop_by_device, False)])
def test_argument_may_be_a_random_key(function, is_right):
    arguments, specs = (BATCH["x"], jax.random.key(0)), (P("dp"), P())
    sentences = shardformer.verify_function(function, drop, arguments, specs, P("dp"), MESHES[:1])
    assert (not sentences) is is_right
