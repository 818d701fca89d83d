"""Training of experts with accumulation, an average of the weights, adapters, and a stop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer import checkpoint
from shardformer.analysis import dense_reference
from shardformer.config import Config
from shardformer.config.names import EXPERT_MATRICES, LAYERS
from shardformer.errors import UsageError
from shardformer.model import model as model_module
from shardformer.model.measuring import measure_routes
from shardformer.training.trainer import Trainer
from tests import asserts, runs, shared
from tests.training.uneven_run import contents

EXPERTS = {"experts": 4, "bias": "none", "activation": "swiglu", "d_ff": 16, "balance_loss": 0.1, "router_z_loss": 0.01}
OPTIONS = EXPERTS | {"mesh": "2x2", "layers": 1, "balance_rate": 0.01}
MODES = ("scan", "multisteps", "manual")
SUM = 1e-6  # of float32 sums in another order


def take_step(trainer: Trainer):
    """Returns (mean gradient as Adam's first moment has it, routers' biases, routes) after one step."""
    state = jax.device_put(shared.on_host(shared.initial_state(**OPTIONS).params), trainer.model.shardings)
    routes = np.asarray(jax.jit(functools.partial(measure_routes, trainer.model))(state, shared.batch()))
    after = shared.on_host(trainer.step(trainer.start(state), shared.batch(), 0)[0])
    momentum = optax.tree.get(after.optimizer, "mu")
    momentum = {module: {n: x for n, x in leaves.items() if hasattr(x, "shape")} for module, leaves in momentum.items()}
    return momentum, after.params[LAYERS]["router_bias"], routes


@functools.cache
def full_batch():
    return take_step(shared.trainer(**OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_accumulation_gives_the_update_of_the_full_batch(mode):
    momentum, bias, routes = take_step(shared.trainer(**OPTIONS, accum=4, accum_mode=mode))
    asserts.assert_trees_close(momentum, full_batch()[0], SUM)
    np.testing.assert_array_equal(bias, full_batch()[1])
    np.testing.assert_array_equal(routes, full_batch()[2])
    assert set(np.unique(np.abs(bias))) <= {0, np.float32(0.01)}


@pytest.mark.slow
def test_balance_of_each_microbatch_is_noticed(broken):
    broken(model_module, "choose_counts", lambda config: model_module.count_nothing)
    config = shared.tiny(**OPTIONS, accum=4)
    momentum, _, _ = take_step(Trainer(config, shared.trainer(**OPTIONS).model.mesh))
    assert asserts.worst_relative(momentum, full_batch()[0]) > 1000 * SUM


@pytest.mark.slow
def test_resume_is_bitwise(tmp_path, text):
    words = ("tiny", "steps=4", "save_every=3", "log_every=1", "eval_every=4", "ema=0.9", "accum=2", f"data={text}")
    words += tuple(f"{name}={value}" for name, value in OPTIONS.items())
    full, stopped = tmp_path / "full", tmp_path / "stopped"
    assert runs.train(*words, f"out={full}") == 0
    assert runs.train(*words, f"out={stopped}", stop_after=2) == 0
    assert checkpoint.list_steps(stopped)[-1] == 2
    assert runs.train("--resume", stopped) == 0
    assert contents(stopped, 4) == contents(full, 4)
    assert contents(full, 3) != contents(full, 4)
    assert runs.rows(stopped) == runs.rows(full)
    assert (stopped / "experts.csv").read_text() == (full / "experts.csv").read_text()


@pytest.mark.slow
def test_average_has_the_experts_and_the_biases():
    trainer, decay = shared.trainer(**OPTIONS, ema=0.5), 0.5
    state, values = trainer.init(), []
    for step in range(2):
        state, _ = trainer.step(state, shared.batch(step), step)
        values.append(shared.on_host(state.params[LAYERS]))
    average = shared.on_host(state.average[LAYERS])
    for name in (*EXPERT_MATRICES, "router", "router_bias"):
        first, second = (value[name].astype(np.float64) for value in values)
        want = (decay * first + second) / (decay + 1)
        assert asserts.relative(average[name], want) < 1e-6
        assert asserts.relative(second, want) > 1e-5  # the last weights are not the average


@pytest.mark.slow
def test_adapters_of_attention_have_the_gradients_of_the_reference():
    options = OPTIONS | {"lora_rank": 2, "lora_targets": "q,o"}
    trainer = shared.trainer(**options)
    params = shared.on_host(shared.initial_state(**options).params)
    layers = params[LAYERS]
    draw = np.random.default_rng(0)
    layers |= {n: draw.normal(size=x.shape).astype(np.float32) for n, x in layers.items() if n.endswith("_lora_out")}
    layers["router_bias"] = draw.normal(size=layers["router_bias"].shape).astype(np.float32) / 10  # the base's
    state = trainer.start(jax.device_put(params, trainer.model.shardings))
    _, got = jax.jit(trainer.model.loss_and_grad)(state.params, shared.batch(), trainer.dropout_key(0))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params)
        batch = shared.batch() | {"weights": np.ones(shared.batch()["tokens"].shape)}
        reference = functools.partial(dense_reference.losses_and_gradients, trainer.config)
        want = shared.on_host(jax.jit(reference)(exact, batch)[1])[LAYERS]
    assert sorted(got[LAYERS]) == ["o_lora_in", "o_lora_out", "q_lora_in", "q_lora_out"]
    for name, gradient in got[LAYERS].items():
        assert asserts.relative(gradient, want[name]) < 1e-5
    after = shared.on_host(trainer.step(state, shared.batch(), 0)[0].params[LAYERS])
    frozen = [name for name in layers if "_lora_" not in name]
    assert {*EXPERT_MATRICES, "router_bias"} < set(frozen)
    asserts.assert_bitwise_equal({n: after[n] for n in frozen}, {n: layers[n] for n in frozen})
    assert asserts.relative(after["q_lora_in"], layers["q_lora_in"]) > 1e-5


@pytest.mark.parametrize("target", ["up", "gate", "down", "shared_up", "router"])
def test_adapters_of_other_matrices_are_rejected(target):
    with pytest.raises(UsageError, match=r"takes some of q,k,v,o,expert_up,expert_gate,expert_down, got "):
        Config.of(**EXPERTS, lora_rank=2, lora_targets=f"q,{target}")


@pytest.mark.slow
def test_frozen_layers_have_frozen_biases():
    trainer = shared.trainer(**OPTIONS, lr_rules="layers=frozen")
    before = shared.on_host(trainer.init().params)
    state, _ = trainer.step(trainer.init(), shared.batch(), 0)
    asserts.assert_bitwise_equal(shared.on_host(state.params[LAYERS]), before[LAYERS])
    assert np.abs(full_batch()[1]).max() > 0  # without the rule they move
