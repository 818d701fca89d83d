"""A user's task: its program on any mesh is that of one device, and what it cannot be is rejected by name."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import Config, UsageError
from shardformer.analysis import memory, verify_exact
from tests import meshes
from tests.tasks.small import Perceptron


def settings(task=None, **keys):
    return Config.of(task=task or Perceptron(), **{"mesh": "2x2", "batch": 8, "warmup": 0, "lr": 0.1} | keys)


def make_model(task=None, **keys):
    return memory.make_trainer(settings(task, **keys)).model


@pytest.mark.parametrize(
    "keys",
    [
        {"mesh": "4x2", "zero": 3},
        {"mesh": "2x4", "zero": 1, "accum": 2, "ema": 0.9},
        {"mesh": "2x2", "zero": 3, "optimizer": "muon", "skip_steps": 5.0},
        {"mesh": "2x2", "zero": 1, "optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0},
    ],
)
def test_program_on_a_mesh_is_that_of_one_device(keys):
    meshes.assert_exact(verify_exact.verify_exactly(settings(**keys)))


def test_metric_that_is_no_mean_over_rows_is_named():
    task = Changed(measure=lambda batch, logits: {"norm": jnp.sqrt(jnp.square(logits).mean()), "size": logits.mean()})
    failed = [row.name for row in verify_exact.verify_exactly(settings(task)) if not row.passes]
    assert failed == ["metrics of 3 steps", "metric norm, a mean over shards"]


def test_sums_are_those_of_one_device():
    sums = [meshes.measure_sums(settings(mesh=mesh, accum=accum))[0] for mesh, accum in (("1x1", 1), ("2x2", 2))]
    np.testing.assert_allclose(*sums, rtol=1e-12)
    assert sums[0].tokens == 8
    assert sums[0]._fields == ("tokens", "nats", "correct", "bytes", "largest")


def test_split_is_read_where_the_module_makes_a_parameter():
    assert make_model(mesh="2x4").specs == {"~": {"up": P(None, "mp"), "down": P("mp", None), "bias": P(None)}}
    assert make_model(mesh="2x4").shapes["~"]["up"].shape == (8, 16)


def test_zero_splits_the_parameters_of_a_task_over_dp():
    assert make_model(mesh="2x4", zero=3).specs["~"]["up"] == P("dp", "mp")
    assert memory.predict_bytes(settings(mesh="2x4", zero=3)).parameters == 4 * (8 * 16 // 8 + 16 * 3 // 8 + 3)


def test_metrics_are_those_that_the_loss_returns():
    model = make_model()
    assert model.details == ("largest",)
    assert model.unmeasured == ("z_loss",)


class Changed(Perceptron):
    """The perceptron with one mistake."""

    def __init__(self, **methods):
        for name, method in methods.items():
            setattr(self, name, method)


def mean_over_dp(batch):
    loss, metrics = Perceptron().loss(batch)
    return lax.pmean(loss, "dp"), metrics


def make(*shape, dtype=jnp.float32, name="w"):
    """Returns a loss whose parameter has this shape; a size of 0 stands for the shards of mp."""

    def loss(batch):
        sizes = [size or 8 // lax.axis_size("mp") for size in shape]
        return (batch["x"].mean() * lax.pmean(hk.get_parameter(name, sizes, dtype, init=jnp.ones).mean(), "mp")).mean()

    return loss


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"join": lambda parts: parts}, r"the loss of Changed differs between the shards of mp: sum the parts"),
        ({"loss": mean_over_dp}, r"the loss of Changed is the same on all shards of dp; return the mean over this"),
        ({"loss": lambda batch: Perceptron().loss(batch)[0] * jnp.ones(2)}, r"is float32\[2\], expected a float32 sca"),
        ({"measure": lambda batch, logits: {"own": lax.axis_index("mp")}}, "the metric own of Changed differs between"),
    ],
)
def test_wrong_loss_is_rejected(methods, message):
    trainer = memory.make_trainer(settings(Changed(**methods)))
    batch = trainer.model.batch_shapes()
    with pytest.raises(UsageError, match=message):
        jax.eval_shape(trainer.model.loss_and_grad, trainer.model.shapes, batch, jax.ShapeDtypeStruct((2,), "uint32"))


def normalise_by_batch(batch):
    x = hk.BatchNorm(True, True, 0.9)(batch["x"], is_training=True)
    return Perceptron().loss(batch | {"x": x})


def drop(parts, key):
    return parts if key is None else hk.dropout(key, 0.5, parts)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"join": lambda parts: drop(lax.psum(parts, "mp"), hk.next_rng_key())}, r"use hk\.maybe_next_rng_key\(\)"),
        ({"measure": lambda batch, logits: {"loss": logits.mean()}}, "a metric is named loss, which is a"),
        ({"loss": normalise_by_batch}, "Changed keeps Haiku state in .*batch_norm.*, and a task has no state: use hk"),
        ({"measure": lambda batch, logits: {"logits": logits}}, r"the metric 'logits' has the shape \(4, 3\); give sc"),
        ({"rows": lambda: {"examples": np.zeros(2)}}, "rows of Changed has examples; give others"),
        ({"rows": dict}, "rows of Changed has no arrays"),
        ({"loss": lambda batch: batch["x"].mean()}, "Changed makes no parameters; its loss must"),
        ({"loss": make(0, 0)}, r"the parameter ~/w has the shape \(8, 8\) on one shard, and \(4, 4\) on one of mp=2; "),
        ({"loss": make(2, dtype=jnp.bfloat16)}, "the parameter ~/w is bfloat16; a run trains float32 parameters"),
    ],
)
def test_module_that_no_run_can_train_is_rejected(methods, message):
    with pytest.raises(UsageError, match=message):
        make_model(Changed(**methods))


def test_loss_may_draw_where_it_has_a_key():
    make_model(Changed(join=lambda parts: drop(lax.psum(parts, "mp"), hk.maybe_next_rng_key())))


def test_name_of_the_language_model_is_rejected():
    def loss(batch):
        with hk.name_scope("transformer"):
            return hk.Linear(1, name="layers")(batch["x"]).mean()

    with pytest.raises(UsageError, match="has a name of the language model's; name it otherwise"):
        make_model(Changed(loss=loss))


def test_configuration_without_its_task_asks_for_it():
    with pytest.raises(UsageError, match=r"trains a task of yours, which each start names; task takes FILE\.py:NAME"):
        memory.make_trainer(settings().replace(task=""))


@pytest.mark.parametrize("mode", ["multisteps", "manual"])
def test_every_way_to_accumulate_has_the_metrics_of_one_pass(mode):
    batch = next(Perceptron().batches(0, 8))
    rows = [run_step(accum=accum, accum_mode=mode, batch=batch) for accum, mode in ((1, "scan"), (2, mode))]
    np.testing.assert_allclose(*rows, rtol=1e-12)
    assert rows[0].shape == (7,)  # those of every step, and `largest`


def run_step(batch, **keys):
    """Returns the metrics of a first step."""
    trainer = memory.make_trainer(settings(**keys))
    return verify_exact.run_steps(trainer, verify_exact.draw_parameters(trainer.config), [batch])[1][0]
