"""The configuration: its files, its keys on resume, and what follows from its values."""

import dataclasses
import json
import subprocess
import sys

import pytest

from shardformer import checkpoint, config
from shardformer.config import FIELDS, GROUPS, Config, key_names, parsing
from shardformer.config.model_keys import ModelKeys
from shardformer.errors import RunError, UsageError


def test_json_round_trip(tmp_path):
    written = Config.of(vocab=60, layers=28, dtype="bfloat16", data="é.txt", seed=7, dropout=0.25)
    (tmp_path / "config.json").write_text(written.to_json())
    assert checkpoint.read_config(tmp_path) == written


def test_launch_keys_are_not_written(tmp_path):
    started = Config.of(vocab=60, coordinator="host:1234", processes=2, process_id=1, start_timeout=5, keep_every=100)
    (tmp_path / "config.json").write_text(started.to_json())
    assert checkpoint.read_config(tmp_path) == Config.of(vocab=60, keep_every=100)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "\xff",
        "[" * 100_000,
        '{"layer": 3}',
        '{"layers": "3"}',
        '{"layers": 0}',
        '{"mesh": "4"}',
        "{}",
        '{"vocab": 0}',
        '{"vocab": 60, "data": "a\\u0000b"}',
        '{"vocab": 60, "data": "\\ud800"}',
        '{"vocab": 60, "lr": 1' + 400 * "0" + "}",
    ],
)
def test_damaged_config_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match="is damaged") as caught:
        checkpoint.read_config(tmp_path)
    assert str(path) in str(caught.value)


def test_folder_without_config_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    no_config = r"is not a run: it has no config\.json"
    reasons = {"": no_config, "nowhere": "is not a run: the folder does not exist", "file": no_config}
    for name, reason in reasons.items():
        with pytest.raises(UsageError, match=reason):
            checkpoint.read_config(tmp_path / name)


@pytest.mark.parametrize("key", config.FIXED_ON_RESUME)
def test_fixed_key_is_rejected_on_resume(key):
    began = Config.of(mesh="1x1", vocab=61)
    assert config.override_on_resume(began, {key: began.get(key)}) == began
    with pytest.raises(UsageError, match=f"^{key} cannot change on resume: the run has"):
        config.override_on_resume(began, {key: object()})


def test_other_keys_may_change_on_resume():
    changes = {"mesh": "2x1", "steps": 9, "lr": 1.0, "dtype": "bfloat16", "scan": False, "remat": "full",
               "dropout": 0.5, "data": "moved.txt", "save_every": 3}  # fmt: skip
    assert config.override_on_resume(Config(), changes) == Config.of(**changes)


def test_inference_needs_no_groups_and_no_reward():
    inferred = Config.of(objective="grpo", batch=16, reward="match").for_inference("1x1")
    assert (inferred.preferences.objective, inferred.start.reward) == ("lm", "")


def test_model_batch_and_state_keys_are_fixed_on_resume():
    shapes = {"layers", "d_model", "heads", "kv_heads", "d_ff", "activation", "seq", "vocab", "vocab_multiple", "block",
              "norm", "norm_eps", "bias", "head_bias", "positions", "rotary_dims", "rotary_theta", "rotary_scaling",
              "attention_scale", "attention_cap", "window", "window_pattern", "window_rotary_theta",
              "embed", "tied", "init_std", "head_dim", "qk_norm", "logits_cap", "embed_scale", "residual_scale",
              "embed_dim", "logits_scale", "sinks", "kv_latent", "q_latent", "value_dim", "query_growth",
              "query_growth_tokens", "window_chunks",
              "previous_tokens", "scale"}  # fmt: skip
    batches = {"tokenizer", "order", "documents", "mask_prompt", "special_tokens", "bos", "batch",
               "seed", "chat_template", "objective", "teacher", "group_size", "answer_tokens", "rollout_steps",
               "rollout_top_k", "rollout_top_p", "token_mean"}  # fmt: skip
    arrays = {"optimizer", "lr_rules", "accum_mode", "base", "ema", "param_dtype",
              "moment_dtype", "lora_rank", "lora_targets", "lora_alpha", "weights",
              "rslora", "quantize_aware"}  # fmt: skip
    experts = {"experts", "dense_first", "expert_pattern", "experts_per_token", "expert_width", "shared_width",
               "shared_gate", "expert_bias", "router", "router_norm", "router_scale", "balance_rate",
               "expert_groups", "groups_per_token", "gate_inputs"}  # fmt: skip
    assert set(key_names(ModelKeys)) == shapes
    assert set(config.ARCHITECTURE) == shapes | experts
    assert set(config.FIXED_ON_RESUME) == shapes | experts | batches | arrays


def test_groups_hold_every_key_once():
    names = key_names(*GROUPS)
    assert sorted(names) == sorted(FIELDS)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [("", (4, 4, 4, 4, 4)), ("fw", (None, 4, None, 4, None)), ("wwf", (4, 4, None, 4, 4)), ("wwwwwwf", (4,) * 5)],
)
def test_pattern_of_windows_repeats_over_the_layers(pattern, windows):
    assert Config.of(layers=5, window=4, window_pattern=pattern).model.layer_windows == windows
    assert Config.of(layers=5, window_pattern=pattern).model.layer_windows == (None,) * 5


def test_padding_depends_on_the_vocabulary_alone():
    padded = {Config.of(vocab=61, batch=8, heads=8, mesh=mesh).model.padded_vocab for mesh in ("8x1", "4x2", "1x8")}
    assert padded == {64}
    assert Config.of(vocab=64).model.padded_vocab == 64


@pytest.mark.parametrize(
    ("text", "shape", "written"),
    [
        ("dp2.cp4.mp1", (2, 1, 1, 4), "dp2.cp4.mp1"),
        ("cp2", (1, 1, 1, 2), "dp1.cp2.mp1"),
        ("mp2.dp4", (4, 2), "4x2"),
        ("dp2.pp2.mp1", (2, 1, 2), "2x1x2"),
        ("4x2x1", (4, 2), "4x2"),
    ],
)
def test_axes_of_a_mesh_have_names(text, shape, written):
    settings = Config.of(mesh=text, batch=8, layers=4, accum=2, heads=8, vocab=64)
    assert (settings.parallel.mesh_shape, str(parsing.parse_mesh(text))) == (shape, written)


def test_mesh_auto_has_no_shape_yet():
    with pytest.raises(ValueError, match="mesh=auto has no shape"):
        _ = Config().parallel.mesh_shape


def test_no_wrong_command_needs_jax():
    code = "import sys, shardformer.config; print(sorted({'jax', 'tensorflow', 'haiku'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.layers = 3
    assert json.loads(Config().to_json())["layers"] == Config().model.layers


OPTIONAL = {name for name, field in FIELDS.items() if parsing.is_optional(field.type)}


MAY_BE_ZERO = {"embed_scale", "expert_width", "quantize_after", "scan", "sft_weight"}


@pytest.mark.parametrize("name", sorted(OPTIONAL - MAY_BE_ZERO))
def test_zero_is_not_none(name):
    with pytest.raises(UsageError, match=f"{name} must be (at least 1|above [01])"):
        Config.of(**parsing.parse_overrides([f"{name}=0"], Config))
    assert parsing.parse_overrides([f"{name}={FIELDS[name].metadata['none']}"], Config) == {name: None}
