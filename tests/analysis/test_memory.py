"""Bytes per device: predicted from specs, and held by live arrays."""

import re
import types

import jax
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.analysis import best_settings, compiling, live, memory, needed_bytes, plan, temporaries, traced
from shardformer.config.names import HOST, is_stacked
from shardformer.config.presets import preset
from shardformer.devices import chips
from shardformer.errors import UsageError
from shardformer.layout import mesh, resolve
from shardformer.model import Model
from tests import shared, tiers
from tests.surroundings import simulate_devices

CASES = [
    *({"mesh": mesh, "zero": zero} for mesh in ("8x1", "4x2", "2x4") for zero in (0, 1, 3)),
    {"mesh": "1x8"},
    {"mesh": "4x2", "dtype": "bfloat16"},
    {"mesh": "4x2", "zero": 1, "ema": 0.9, "lr_rules": "up=frozen"},
    {"mesh": "4x2", "zero": 3, "lora_rank": 2},
    {"mesh": "4x2", "zero": 1, "dtype": "bfloat16", "param_dtype": "bfloat16", "moment_dtype": "bfloat16"},
    {"mesh": "4x2", "zero": 1, "dtype": "bfloat16", "param_dtype": "bfloat16", "offload": "optimizer"},
    {"mesh": "4x2", "zero": 1, "optimizer": "muon", "accum": 2, "accum_mode": "multisteps"},
    *(
        {"experts": 6, "bias": "none", "balance_rate": 0.1} | more
        for more in (
            {"mesh": "2x4", "zero": 1, "shared_width": 8},  # mp=4 does not divide the experts
            {"mesh": "4x2", "zero": 3, "ema": 0.9, "dense_first": 1},
            {"mesh": "2x4", "optimizer": "muon"},
        )
    ),
]


def live_state(**options):
    """Zeros in the place of a training state's arrays: what takes memory are shapes and shardings."""
    trainer = shared.trainer(**options)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trainer.abstract)
    return jax.device_put(zeros, trainer.shardings)


def held_bytes(tree, on_host: bool = False) -> set[int]:
    """By every device, or in the host's memory for it, from the arrays themselves."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        if (leaf.sharding.memory_kind == HOST) != on_host:
            continue
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return set(held.values())


@pytest.mark.parametrize("options", CASES, ids=str)
def test_predicted_state_is_what_live_arrays_hold(options):
    state, predicted = live_state(**options), memory.predict_bytes(shared.tiny(**options))
    assert held_bytes(state.params) == {predicted.parameters}
    updated = state.optimizer, state.masters
    assert held_bytes(updated) == {predicted.optimizer}
    assert held_bytes(updated, on_host=True) == {predicted.host}
    assert bool(predicted.host) == ("offload" in options)
    assert held_bytes(state.average) == {predicted.average}


@pytest.mark.parametrize(("mesh", "zero"), tiers.shorten([("2x4", 3), ("4x2", 1)]))
def test_predicted_gradients_are_what_live_gradients_hold(mesh, zero):
    trainer = shared.trainer(mesh=mesh, zero=zero)
    args = live_state(mesh=mesh, zero=zero).params, shared.batch(), trainer.dropout_key(0)
    _, gradients = jax.jit(trainer.model.loss_and_grad)(*args)
    assert held_bytes(gradients) == {memory.predict_bytes(trainer.config).gradients}


def test_split_arrays_count_as_split():
    whole, split = (memory.predict_bytes(shared.tiny(mesh="8x1", zero=zero)) for zero in (0, 3))
    assert split.optimizer < whole.optimizer / 4
    assert split.parameters < whole.parameters / 4


def test_the_table_adds_up():
    config = shared.tiny(ema=0.9)
    predicted = memory.predict_bytes(config)
    lines = memory.format_device_bytes(config).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["parameters", "gradients", "optimizer", "average", "together"]
    assert predicted.total == sum(predicted)


@pytest.mark.parametrize(
    ("changes", "compiled"),
    [({}, 208.3), ({"remat": "full"}, 81.4), ({"scan": False}, 208.8), ({"accum": 2}, 114.1)],
    ids=str,
)
def test_adapter_activations_are_near_the_compilers(changes, compiled):
    """MB of arguments and temporaries, jax 0.10.2: XLA keeps nothing for the gradients of frozen weights."""
    sizes = {"layers": 4, "dtype": "float32", "batch": 32, "mesh": "4x2", "dropout": 0.0, "vocab": 65}
    config = preset("shakespeare_char").replace(lora_rank=8, **sizes, **changes)
    estimate = memory.predict_bytes(config).total + temporaries.estimate_temporaries(resolve(config))
    assert estimate == pytest.approx(compiled * 1e6, rel=0.10)


@pytest.mark.slow
def test_mesh_auto_of_a_tpu_needs_what_its_plan_estimates(monkeypatch):
    """The attention kernel, the loss chunk, the exchanges and the fast memory are the chip's."""
    places = [(x, y, 0) for x in range(2) for y in range(4)]
    devices = [types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", coords=place) for place in places]
    sizes = {"d_model": 512, "heads": 4, "seq": 1024, "batch": 64, "vocab": 50_400, "dtype": "bfloat16"}
    config = shared.tiny(mesh="8x1", zero=3, **sizes)
    planned = plan.estimate(config, chips.parse_slice("v5e:2x4"))
    on_cpu = needed_bytes.predict_needed(config)
    simulate_devices(monkeypatch, devices)
    assert needed_bytes.predict_needed(config) == planned.estimate > planned.stored.total
    assert planned.estimate != on_cpu


def test_small_run_is_bounded_without_a_trace(monkeypatch):
    config, large = shared.tiny(mesh="2x1", vocab=64), shared.tiny(mesh="2x1", vocab=64, batch=2_000_000)
    exact = needed_bytes.predict_needed(config)
    monkeypatch.setattr(needed_bytes, "predict_needed", lambda config: -1)
    assert exact < needed_bytes.predict_unless_small(config)
    assert needed_bytes.predict_unless_small(large) == -1


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": 2, "bias": "none"},
        {"objective": "distill", "teacher": "large"},
        {"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0},
    ],
)
def test_model_that_the_bound_does_not_count_is_traced(changes, monkeypatch):
    monkeypatch.setattr(needed_bytes, "predict_needed", lambda config: -1)
    assert needed_bytes.predict_unless_small(shared.tiny(mesh="2x1", vocab=64, **changes)) == -1


def test_small_policy_of_a_reward_model_is_traced(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    policy = shared.tiny(mesh="2x1", vocab=64, objective="grpo", group_size=2, answer_tokens=8)
    monkeypatch.setattr(needed_bytes, "predict_needed", lambda config: -1)
    assert needed_bytes.predict_unless_small(policy) > 0
    assert needed_bytes.predict_unless_small(policy.replace(reward=str(tmp_path))) == -1


WIDE = {"d_model": 64, "seq": 128, "dropout": 0.0}


def compiled_bytes(config) -> int:
    return compiling.compile_step(config, mesh.make(config), "cpu").bytes


@pytest.mark.slow
def test_pairs_take_the_memory_of_twice_the_rows():
    """The references are numbers of the batch: no second model is on the devices."""
    pairs = compiled_bytes(shared.tiny(objective="dpo", batch=8, **WIDE))
    assert pairs == pytest.approx(compiled_bytes(shared.tiny(batch=16, **WIDE)), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"mesh": "4x2"}, {"mesh": "2x4", "zero": 1, "vocab": 512}], ids=str)
def test_distillation_is_near_the_compilers(keys, tmp_path):
    """Parameters of the teacher, its activations, and the logits of both."""
    teacher = shared.tiny(d_model=96, layers=3, seq=128, **keys)
    (tmp_path / "config.json").write_text(teacher.replace(mesh="1x1", zero=0).to_json())
    config = shared.tiny(objective="distill", teacher=str(tmp_path), batch=32, **WIDE, **keys)
    predicted = memory.predict_bytes(config)
    plain = memory.predict_bytes(config.replace(objective="lm", teacher=""))
    assert predicted.parameters - plain.parameters == memory.predict_bytes(teacher).parameters
    estimate = predicted.total + temporaries.estimate_temporaries(resolve(config))
    assert estimate == pytest.approx(compiled_bytes(config), rel=0.10)


@pytest.mark.parametrize("mode", ["manual", "multisteps"])
def test_a_step_of_several_programs_is_not_measured_as_one(mode, capsys):
    refusal = f"accum_mode={mode} is several programs a step.* give accum_mode=scan"
    config = shared.tiny(mesh="4x2", batch=16, accum=2, accum_mode=mode)

    def compile_it(config):
        return compiling.compile_step(config, mesh.make(config), "cpu")

    def find_collectives(config):
        return traced.find_collectives(resolve(config))

    for measure in (live.measure, find_collectives, compile_it):
        with pytest.raises(UsageError, match=refusal):
            measure(config)
    for words in (["memory", "mesh=4x2", "picture="], ["plan", "mesh=4x2", "compiler=none"], ["plan", "sweep=true"]):
        assert main([words[0], "tiny", *words[1:], "batch=16", "accum=2", f"accum_mode={mode}"]) == 2
        assert re.search(refusal, capsys.readouterr().err)


@pytest.mark.slow
def test_one_microbatch_is_one_program():
    """MultiSteps keeps a sum of gradients with accum=1 too, as training does."""
    measured = live.measure(shared.tiny(mesh="4x2", accum_mode="multisteps"))
    assert set(measured.live["optimizer"].values()) == {measured.predicted.optimizer}
    alone = memory.predict_bytes(shared.tiny(mesh="4x2"))
    assert measured.predicted.optimizer >= alone.optimizer + alone.gradients


def test_offloaded_state_outside_of_layers_is_on_the_device_during_a_step():
    """Its copies from the host start before the backward pass. Moments are two float32 values a parameter."""

    config = shared.tiny(mesh="1x1", layers=1, batch=32)

    def moment_bytes(is_counted):
        shapes = Model.abstract_parameters(config)
        leaves = (leaf for module, leaves in shapes.items() if is_counted(module) for leaf in leaves.values())
        return sum(2 * 4 * leaf.size for leaf in leaves if leaf.ndim >= 2)

    hosted, kept = (temporaries.estimate_temporaries(resolve(config.replace(offload=o))) for o in ("optimizer", "none"))
    assert hosted - kept == moment_bytes(lambda module: not is_stacked(module))
    assert hosted - kept < moment_bytes(lambda module: True)


@pytest.mark.parametrize(("shape", "zero"), [("1x1", 0), ("4x2", 0), ("4x2", 1)])
def test_reward_model_of_a_policy_counts(shape, zero, tmp_path):
    reward = shared.tiny(mesh="1x1", objective="reward", layers=1, d_ff=64, bias="none")
    (tmp_path / "config.json").write_text(reward.to_json())
    policy = shared.tiny(mesh=shape, zero=zero, objective="grpo", group_size=2, answer_tokens=8)
    plain, scored = (memory.predict_bytes(policy.replace(reward=name)) for name in ("", str(tmp_path)))
    table, layer, norms, head = 64 * 32, 4 * 32 * 32 + 2 * 32 * 64, 2 * 32, 32
    mp = policy.parallel.mp
    assert scored.reward_model == 4 * ((table + layer) // mp + norms + head)
    assert scored.total - plain.total == scored.reward_model
    assert plain.reward_model == 0


def test_compiled_step_and_reward_model_count_together():
    stored = memory.DeviceBytes(40, 20, 30, 0, reward_model=10)
    figures = {"bytes": 90, "arguments": 60, "temporary": 30, "seconds": 1, "cycles": 0}
    compiled = types.SimpleNamespace(compiler="libtpu", refused="", timeline=None, collectives=None, **figures)
    planned = plan.Plan(None, None, stored, 10, [], None, compiled)  # type: ignore[arg-type]
    assert planned.bytes == 100
    shown = plan.format_compiled(planned)
    assert re.search(r"reward model +10 B\n.*together +100 B\n.*the estimate is 10% above that", shown, re.DOTALL)
    assert ("reward model", 10) in stored.list_kinds()
    measured = live.Measured(shared.tiny(mesh="1x1"), stored, 10, 60, 30, {"params": {}, "optimizer": {}}, None, [])
    assert re.search(r"together +110 B +100 B", live.format_measured(measured))


def test_meshes_that_do_not_divide_the_rewards_are_left_out(tmp_path):
    reward = shared.tiny(mesh="1x1", objective="reward", heads=2)
    (tmp_path / "config.json").write_text(reward.to_json())
    policy = shared.tiny(mesh="auto", objective="grpo", group_size=2, answer_tokens=8, batch=8)
    slice_, free = chips.parse_slice("v5e:2x4"), ()

    def list_mp(config):
        return {each.config.parallel.mp for each in best_settings.list_candidates(config, slice_, free)}

    assert list_mp(policy) == {1, 2, 4, 8}
    assert list_mp(policy.replace(reward=str(tmp_path))) == {1, 2}


def test_reward_of_another_objective_is_rejected_in_plans(tmp_path):
    (tmp_path / "config.json").write_text(shared.tiny(mesh="1x1", objective="dpo", documents="padded").to_json())
    policy = shared.tiny(mesh="1x1", objective="grpo", group_size=2, answer_tokens=8, reward=str(tmp_path))
    with pytest.raises(UsageError, match="was trained with objective=dpo, expected objective=reward"):
        memory.predict_bytes(policy)
