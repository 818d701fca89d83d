"""Training of experts with an average of the weights, adapters, frozen layers, and a stop."""

import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.analysis import traced, verify_exact
from shardformer.config import Config
from shardformer.config.names import EXPERT_MATRICES, LAYERS
from shardformer.errors import UsageError
from tests import asserts, meshes, runs, shared
from tests.training.uneven_run import contents

EXPERTS = {"experts": 4, "bias": "none", "activation": "swiglu", "d_ff": 16, "balance_loss": 0.1, "router_z_loss": 0.01}
OPTIONS = EXPERTS | {"mesh": "2x2", "layers": 1, "balance_rate": 0.01}


def run_exactly(steps: int, **keys):
    """Returns the training state after some steps in float64."""
    trainer = traced.make_trainer(shared.tiny(**OPTIONS | keys))
    batches = [shared.batch(step) for step in range(steps)]
    return verify_exact.run_steps(trainer, verify_exact.draw_parameters(trainer.config), batches)[0]


@pytest.mark.nightly
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


def test_average_has_the_experts_and_the_biases():
    decay, states = 0.5, [run_exactly(steps, ema=0.5) for steps in (1, 2)]
    values, average = [state.params[LAYERS] for state in states], states[-1].average[LAYERS]
    for name in (*EXPERT_MATRICES, "router", "router_bias"):
        first, second = (value[name] for value in values)
        want = (decay * first + second) / (decay + 1)
        assert asserts.relative(average[name], want) < 1e-7  # the factors are float32
        assert asserts.relative(second, want) > 1e-5  # the last weights are not the average


def test_adapters_of_attention_have_the_gradients_of_the_reference():
    adapters = {"lora_rank": 2, "lora_targets": "q,o"}
    meshes.assert_equals_one_device(with_steps=False, **OPTIONS | adapters)
    config = shared.tiny(**OPTIONS | adapters)
    layers, after = verify_exact.draw_parameters(config)[LAYERS], run_exactly(1, **adapters).params[LAYERS]
    frozen = [name for name in layers if "_lora_" not in name]
    assert {*EXPERT_MATRICES, "router_bias"} < set(frozen)
    for name, leaf in layers.items():
        assert np.array_equal(after[name], leaf) == (name in frozen), name


@pytest.mark.parametrize("target", ["up", "gate", "down", "shared_up", "router"])
def test_adapters_of_other_matrices_are_rejected(target):
    with pytest.raises(UsageError, match=r"takes some of q,k,v,o,expert_up,expert_gate,expert_down, got "):
        Config.of(**EXPERTS, lora_rank=2, lora_targets=f"q,{target}")


def test_frozen_layers_have_frozen_biases():
    config = shared.tiny(**OPTIONS)
    before, after = (
        verify_exact.draw_parameters(config)[LAYERS],
        run_exactly(1, lr_rules="layers=frozen").params[LAYERS],
    )
    for name, leaf in before.items():
        np.testing.assert_array_equal(after[name], leaf)
    assert (run_exactly(1).params[LAYERS]["router_bias"] != before["router_bias"]).any()  # without the rule they move
