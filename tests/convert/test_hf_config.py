"""The keys of a Hugging Face config.json: what they mean, which are ignored, which are rejected."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.config import Config
from shardformer.convert import hf_settings, runs
from shardformer.convert.families import FAMILIES, REJECTED
from shardformer.convert.hf_special_tokens import find_stored
from shardformer.convert.text_models import WRAPPERS
from shardformer.data import SpecialTokens
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.shards.positions import find_rotation
from shardformer.training.run_folder import Run
from tests.convert.conftest import GOLDENS
from tests.convert.hf_models import FOLDER
from tests.convert.record_rotary import GOLDEN, LLAMA, NEOX
from tests.convert.test_hf import on_devices, params_of
from tests.runs import USAGE

ROTARY = json.loads(GOLDEN.read_text())


def write(folder: Path, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copy_model(name: str, target: Path, **changes) -> Path:
    """Copies a recorded model without its generation_config.json."""
    shutil.copytree(FOLDER / name, target)
    (target / "generation_config.json").unlink()
    return write(target, json.loads((target / "config.json").read_text()) | changes)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_frequencies_are_transformers(name, tmp_path):
    _, config = hf_settings.read_config(write(tmp_path / "src", ROTARY[name]["config"]))
    ours = find_rotation(config) if config.model.positions == "rotary" else np.zeros(0)
    np.testing.assert_allclose(ours, ROTARY[name]["frequencies"], rtol=1e-6)
    assert config.model.rotary_factor == pytest.approx(ROTARY[name].get("factor", 1.0), rel=1e-12)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (NEOX | {"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, "partial_rotary_factor=1.0 contradicts"),
        (NEOX | {"rotary_emb_base": 500, "rope_theta": 300}, "rope_theta=300 contradicts"),
        (NEOX | {"rotary_pct": 0.4}, "rotary_dims=3 must be even"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not computed"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not a scaling"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 3.0}}, "attention_factor=3.0"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale=0.7 of rope_type=yarn"),
        (LLAMA | {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type=longrope needs short_factor"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved=True is not computed"),
    ],
)
def test_contradicting_rotary_keys_are_rejected(config, named, tmp_path):
    with pytest.raises(UsageError, match=r"config\.json: ") as rejection:
        hf_settings.read_config(write(tmp_path / "src", config))
    assert named in str(rejection.value)


def test_no_rotating_dimension_goes_there_and_back(tmp_path):
    source = copy_model("neox_parallel", tmp_path / "src", rotary_pct=0.1, rope_parameters=None)
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    assert Run.open(tmp_path / "run").config.model.positions == "none"
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    theirs = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (theirs["rotary_pct"], theirs["rope_parameters"]["partial_rotary_factor"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["gpt_neox", "stablelm", "phi3"])
def test_share_of_rotating_dimensions_is_exact(name):
    """30 / 44 * 44 is below 30 in floats, and transformers rounds it down to 29 dimensions."""
    config = Config.of(d_model=88, heads=2, rotary_dims=30, vocab=61)
    written = FAMILIES[name].write(config)
    share = written["rope_parameters"]["partial_rotary_factor"]
    older_name = "rotary_pct" if name == "gpt_neox" else "partial_rotary_factor"
    assert written[older_name] == share
    assert (int(44 * share), int(44 * (30 / 44))) == (30, 29)


def test_partly_rotating_heads_are_no_llama():
    config = hf_settings.read_config(FOLDER / "llama")[1].replace(rotary_dims=2)
    assert hf_settings.choose_family(config, "llama") == "glm"
    with pytest.raises(UsageError, match="no Hugging Face family has rotary_dims=2"):
        hf_settings.choose_family(config.replace(embed_scale=2.0))


def test_no_family_reads_the_tokens_before_each():
    config = hf_settings.read_config(FOLDER / "llama")[1].replace(previous_tokens=1)
    with pytest.raises(UsageError, match="no Hugging Face family has previous_tokens=1; the closest, llama"):
        hf_settings.choose_family(config, "llama")


def test_attention_types_rule_over_attention_layers(tmp_path):
    source = copy_model("gpt_neo", tmp_path / "src", attention_layers=["global", "global"], window_size=8)
    with pytest.raises(UsageError, match="attention_layers contradicts attention_types"):
        hf_settings.read_config(source)


def test_a_second_name_of_a_key_is_read(tmp_path):
    theirs = json.loads((FOLDER / "gpt2" / "config.json").read_text())
    expected = hf_settings.read_config(FOLDER / "gpt2")
    theirs["hidden_size"] = theirs.pop("n_embd")
    assert hf_settings.read_config(write(tmp_path / "src", theirs)) == expected
    with pytest.raises(UsageError, match="hidden_size=32 contradicts n_embd=64"):
        hf_settings.read_config(write(tmp_path / "src", theirs | {"n_embd": 64}))


def test_a_key_without_effect_is_named_in_one_line(tmp_path, capsys):
    source = copy_model("gpt2", tmp_path / "src", _num_labels=1, custom_pipelines={"a": {"impl": "b.C"}})
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ignored" in line]
    assert line.endswith("without effect on the model: _num_labels=1, custom_pipelines={'a': {'impl': 'b.C'}}")


def test_last_norm_that_was_removed_is_rejected(tmp_path, capsys):
    source = copy_model("opt", tmp_path / "src", _remove_final_layer_norm=True)
    assert main(["convert", str(source), str(tmp_path / "run")]) == USAGE
    assert "_remove_final_layer_norm=True is not computed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"word_embed_proj_dim": "16"}, "word_embed_proj_dim='16' is not a number of dimensions"),
        ({"do_layer_norm_before": "no"}, "do_layer_norm_before='no'; expected true or false"),
    ],
)
def test_width_and_norms_of_opt_are_checked(changes, problem, tmp_path):
    with pytest.raises(UsageError, match=problem):
        hf_settings.read_config(copy_model("opt", tmp_path / "src", **changes))


def test_ignore_config_accepts_an_unknown_key(tmp_path, capsys):
    source = copy_model("gpt2", tmp_path / "src", made_up=7)
    assert main(["convert", str(source), str(tmp_path / "run")]) == USAGE
    assert "made_up=7 is not known here, and may change what the model" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "run"), "ignore_config=made_up"]) == 0


@pytest.mark.parametrize(
    ("key", "message"), [("n_layer", "the model cannot be built without it"), ("absent", "config.json has no such key")]
)
def test_ignore_config_rejects(key, message, tmp_path, capsys):
    assert main(["convert", str(FOLDER / "gpt2"), str(tmp_path / "run"), f"ignore_config={key}"]) == USAGE
    assert message in capsys.readouterr().err


def test_a_short_context_reads_the_first_positions(tmp_path):
    assert main(["convert", str(FOLDER / "gpt_neo"), str(tmp_path / "short"), "seq=8"]) == 0
    assert main(["convert", str(FOLDER / "gpt_neo"), str(tmp_path / "all")]) == 0
    long, short = (Run.open(tmp_path / name) for name in ("all", "short"))
    assert (long.config.model.seq, short.config.model.seq) == (24, 8)
    np.testing.assert_array_equal(read_positions(long)[:8], read_positions(short))


def read_positions(run: Run) -> np.ndarray:
    with runs.open_state(run, step=0, with_moments=False) as state:
        return np.asarray(state.params["transformer/embed/positions"])


@pytest.mark.parametrize(
    ("model", "key", "name"),
    [
        ("gpt2", "activation_function", "gelu_fast"),
        ("gpt2", "activation_function", "gelu_pytorch_tanh"),
        ("neox_parallel", "hidden_act", "gelu_fast"),
        ("starcoder2", "hidden_act", "gelu_new"),
        ("gemma", "hidden_act", "gelu"),
    ],
)
def test_an_activation_keeps_its_published_name(model, key, name, tmp_path):
    source = copy_model(model, tmp_path / "src", **{key: name})
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())[key] == name


def test_an_activation_of_another_family_is_not_kept():
    special = SpecialTokens(config={"model_type": "gpt2", "hidden_act": "gelu_fast", "attn_pdrop": 0.0})
    assert find_stored(special, "starcoder2", {"hidden_act": "gelu_pytorch_tanh"}) == {
        "model_type": "gpt2", "attn_pdrop": 0.0
    }  # fmt: skip


# Special token ids.


def special_tokens(folder):
    return hf_settings.read_model(folder).special_tokens


def test_generation_config_rules_over_config(tmp_path):
    source = copy_model("llama", tmp_path / "src", bos_token_id=3, eos_token_id=4, pad_token_id=5)
    assert special_tokens(source).ends == (4,)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    found = special_tokens(source)
    assert (found.beginning, found.ends, found.padding) == (3, (6, 7), 5)


def test_tokenizer_config_names_ids_that_config_lacks(tmp_path):
    source = copy_model("llama", tmp_path / "src", bos_token_id=None, eos_token_id=None)
    tokens = {"eos_token": {"content": "<end>"}, "bos_token": "<begin>"}
    added = {"8": {"content": "<end>"}, "9": {"content": "<begin>"}}
    (source / "tokenizer_config.json").write_text(json.dumps(tokens | {"added_tokens_decoder": added}))
    found = special_tokens(source)
    assert (found.beginning, found.ends, found.padding) == (9, (8,), None)


def test_absent_ids_are_those_of_transformers_class(tmp_path):
    expected = {"gptj": (50256, 50256), "gpt2": (50256, 50256), "gpt_neox": (0, 2), "llama": (1, 2)}
    for name, ids in expected.items():
        found = special_tokens(write(tmp_path / name, {"model_type": name}))
        assert (found.beginning, *found.ends) == ids, name


def test_ids_beyond_the_vocabulary_are_dropped(tmp_path):
    found = special_tokens(copy_model("llama", tmp_path / "src", eos_token_id=[2, 61], pad_token_id=-1))
    assert (found.ends, found.padding) == ((2,), None)


@pytest.mark.parametrize("value", ["2", 2.0, [True], {"id": 2}])
def test_an_id_that_is_no_number_is_rejected(value, tmp_path):
    with pytest.raises(UsageError, match="is not a token id; expected a whole number or a list"):
        special_tokens(copy_model("llama", tmp_path / "src", eos_token_id=value))


def test_ids_and_dropouts_go_there_and_back(tmp_path):
    changes = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6, "attn_pdrop": 0.25, "embd_pdrop": 0.5}
    source = copy_model("gpt2", tmp_path / "src", **changes)
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    assert Run.open(tmp_path / "run").special_tokens.ends == (7,)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    theirs = json.loads((tmp_path / "back" / "config.json").read_text())
    assert theirs | changes == theirs
    assert (tmp_path / "back" / "generation_config.json").read_text() == '{"eos_token_id": 7}'
    assert special_tokens(tmp_path / "back") == special_tokens(source)


def test_a_run_without_special_tokens_writes_null(tmp_path):
    for name in ("gptj", "neox_parallel"):
        source = copy_model(name, tmp_path / f"{name}-src", bos_token_id=None, eos_token_id=None)
        assert main(["convert", str(source), str(tmp_path / name)]) == 0
        (tmp_path / name / "special_tokens.json").unlink()
        assert main(["convert", str(tmp_path / name), str(tmp_path / f"{name}-back"), "format=hf"]) == 0
        theirs = json.loads((tmp_path / f"{name}-back" / "config.json").read_text())
        assert (theirs["bos_token_id"], theirs["eos_token_id"]) == (None, None)


@pytest.fixture
def opened_with(monkeypatch):
    """Gives the runs that are opened other keys, as if they had been trained with them."""

    def change(**keys):
        opened = Run.open
        monkeypatch.setattr(Run, "check_config", lambda run, folder: None)
        monkeypatch.setattr(
            Run, "open", lambda out: dataclasses.replace(run := opened(out), config=run.config.replace(**keys))
        )

    return change


def test_scale_is_written_as_the_factors_that_it_stands_for(tmp_path, opened_with):
    assert main(["convert", str(FOLDER / "granite"), str(tmp_path / "run")]) == 0
    model = Run.open(tmp_path / "run").config.model
    opened_with(scale=f"completep:{model.d_model // 2}x{model.layers}")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "format=hf"]) == 0
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (FOLDER / "granite", tmp_path / "hf")
    )
    assert after["residual_multiplier"] == before["residual_multiplier"]
    assert after["logits_scaling"] == pytest.approx(2 * before["logits_scaling"])


@pytest.mark.parametrize(("target", "option"), [("hf", "format=hf"), ("model.gguf", "tokenizer=false")])
def test_run_at_its_tuned_size_is_written(target, option, tmp_path, opened_with):
    assert main(["convert", str(FOLDER / "llama"), str(tmp_path / "run")]) == 0
    model = Run.open(tmp_path / "run").config.model
    opened_with(scale=f"completep:{model.d_model}x{model.layers}")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / target), option]) == 0


def test_width_of_experts_is_written_if_it_is_d_ff(tmp_path, opened_with):
    assert main(["convert", str(FOLDER / "qwen3_moe"), str(tmp_path / "run")]) == 0
    width = Run.open(tmp_path / "run").config.mixture.expert_size
    opened_with(expert_width=None, d_ff=width)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "format=hf"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["moe_intermediate_size"] == width


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rotary-2", "rotary-8"])
def test_gptj_shards_go_to_hugging_face(case, recorded, tmp_path):
    """The bias of GPT-J's embedding becomes part of the token table; the logits are those of GPT-J's code."""
    assert main(["convert", str(recorded / case), str(tmp_path / "run")]) == 0
    assert Run.open(tmp_path / "run").config.model.embed == "bias"
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "format=hf"]) == 0
    family, config = hf_settings.read_config(tmp_path / "hf")
    assert (family, config.model.embed) == ("gptj", "plain")
    golden, ours = np.load(recorded / case / "golden.npz"), model_of(config)
    logits = Decoder(ours).logits(
        on_devices(ours, params_of(tmp_path / "hf")), golden["tokens"][:, :-1].astype(np.int32)
    )
    vocab = golden["logits"].shape[-1]
    np.testing.assert_allclose(np.asarray(logits)[0, :, :vocab], golden["logits"][0], atol=3e-6)


def model_of(config):
    config = config.replace(mesh="1x1", batch=1)
    return Model.on(config, mesh.make(config))


# Places and files.


def test_a_target_with_an_equals_sign_is_a_path(tmp_path):
    run = tmp_path / "lr=1e-3" / "run"
    run.parent.mkdir()
    assert main(["convert", str(FOLDER / "gpt2"), str(run)]) == 0
    assert Run.open(run).config.model.layers == 2


def dangling_link(path):
    path.symlink_to("nowhere.json")


@pytest.mark.parametrize("make", [dangling_link, Path.mkdir, os.mkfifo])
def test_a_tokenizer_that_is_no_file_is_rejected(make, tmp_path, capsys):
    source = copy_model("gpt2", tmp_path / "src")
    make(source / "tokenizer.json")
    assert main(["convert", str(source), str(tmp_path / "run")]) == USAGE
    assert f"tokenizer={source / 'tokenizer.json'}" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "run"), "tokenizer=ids"]) == 0


PUBLISHED_DEFAULTS = {  # of transformers' configuration classes
    "gpt2": {"norm_eps": 1e-5, "activation": "gelu", "d_model": 768, "layers": 12, "heads": 12, "tied": True},
    "llama": {"norm_eps": 1e-6, "activation": "swiglu", "d_model": 4096, "d_ff": 11008, "tied": False},
    "gpt_neox": {"norm_eps": 1e-5, "activation": "gelu_exact", "d_model": 6144, "rotary_dims": 24},
}


@pytest.mark.parametrize("kind", PUBLISHED_DEFAULTS)
def test_missing_keys_have_the_defaults_of_transformers(kind, tmp_path):
    _, config = hf_settings.read_config(write(tmp_path / "src", {"model_type": kind}))
    expected = PUBLISHED_DEFAULTS[kind]
    assert {name: config.get(name) for name in expected} == expected


@pytest.mark.parametrize(("step", "dense", "sparse"), [(2, [], [1, 3]), (1, [0], [1, 2, 3]), (3, [], [2])])
def test_layers_with_experts_are_those_of_transformers(step, dense, sparse, tmp_path):
    """Every `decoder_sparse_step`-th layer, the first not among them, except those of `mlp_only_layers`."""
    theirs = {"model_type": "qwen2_moe", "num_hidden_layers": 4, "decoder_sparse_step": step, "mlp_only_layers": dense}
    _, config = hf_settings.read_config(write(tmp_path / "src", theirs))
    assert [i for i, has_experts in enumerate(config.mixture.sparse_layers) if has_experts] == sparse


@pytest.mark.parametrize(("keys", "sparse"), [((1, 2, 1), [1, 2]), ((0, -1, 2), [1, 3]), ((2, 9, 3), [2])])
def test_layers_with_experts_of_ernie_are_written_again(keys, sparse, tmp_path):
    """Every `moe_layer_interval`-th layer, counted from the model's first one, from `start` to `end`."""
    names = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
    theirs = {"model_type": "ernie4_5_moe", "num_hidden_layers": 4} | dict(zip(names, keys, strict=True))
    family, config = hf_settings.read_config(write(tmp_path / "src", theirs))
    assert [i for i, has_experts in enumerate(config.mixture.sparse_layers) if has_experts] == sparse
    assert hf_settings.list_differences(FAMILIES[family], config) == []
    again = write(tmp_path / "again", theirs | FAMILIES[family].write(config))
    assert hf_settings.read_config(again) == (family, config)


def test_ernie_cannot_have_experts_in_any_layers(tmp_path):
    theirs = {"model_type": "ernie4_5_moe", "num_hidden_layers": 4}
    config = hf_settings.read_config(write(tmp_path / "src", theirs))[1].replace(dense_first=0, expert_pattern="edee")
    assert hf_settings.list_differences(FAMILIES["ernie4_5_moe"], config) == ["expert_pattern=edee"]


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_more_groups_than_there_are_are_rejected(kind, tmp_path):
    theirs = {"model_type": kind, "n_group": 1, "topk_method": "noaux_tc", "num_experts_per_tok": 4}
    if kind == "deepseek_v2":
        theirs |= {"topk_method": "group_limited_greedy"}
    source = write(tmp_path / "src", theirs | {"topk_group": 4})
    with pytest.raises(UsageError, match="topk_group=4 is more than n_group=1; expected at most 1"):
        hf_settings.read_config(source)
    assert hf_settings.read_config(write(tmp_path / "one", theirs | {"topk_group": 1}))[0] == kind


def test_layers_with_experts_of_first_files_are_all_but_one(tmp_path):
    theirs = {"model_type": "glm4_moe_lite", "num_hidden_layers": 3}
    _, config = hf_settings.read_config(write(tmp_path / "src", theirs | {"first_k_dense_replace": 1}))
    assert config.mixture.sparse_layers == (False, True, True)
    with pytest.raises(UsageError, match="first_k_dense_replace=2 is not computed here without mlp_layer_types"):
        hf_settings.read_config(write(tmp_path / "two", theirs | {"first_k_dense_replace": 2}))


def test_first_files_of_sarvam_are_read(tmp_path):
    rope = {"type": "deepseek_yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    theirs = {"model_type": "sarvam_mla", "num_experts": 8, "num_shared_experts": 2, "head_dim": 576}
    sources = (theirs | {"rope_scaling": rope}, theirs | {"rope_scaling": rope | {"type": "yarn"}})
    first, second = (hf_settings.read_config(write(tmp_path / str(i), source))[1] for i, source in enumerate(sources))
    assert first == second
    assert (first.experts.experts, first.experts.shared_width, first.model.head_size) == (8, 4096, 192)
    assert first.model.rotary_scaling.startswith("yarn:40,")


def test_fixed_alpha_of_hunyuan_is_a_base_of_its_frequencies(tmp_path):
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    theirs = {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_theta": 10_000.0, "rope_scaling": rope}
    config = hf_settings.read_config(write(tmp_path / "src", theirs))[1]
    assert (config.model.rotary_theta, config.model.rotary_scaling) == (10_000 * 1000 ** (128 / 126), "")
    with pytest.raises(UsageError, match="rope_type='dynamic' is not a scaling"):
        hf_settings.read_config(write(tmp_path / "without", theirs | {"rope_scaling": {"type": "dynamic"}}))


def test_queries_of_a_ministral_3_grow_only_with_yarn(tmp_path):
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.2}
    config = hf_settings.read_config(write(tmp_path / "src", {"model_type": "ministral3", "rope_parameters": rope}))[1]
    assert (config.model.query_growth, config.model.shorter_context) == (0.2, 64)
    linear = {"model_type": "ministral3", "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    source = write(tmp_path / "linear", linear)
    with pytest.raises(UsageError, match="rope_type='linear' is not computed here; expected 'yarn'"):
        hf_settings.read_config(source)
    assert hf_settings.choose_family(config.replace(query_growth=0.0, rotary_scaling="")) == "llama"


@pytest.mark.parametrize(
    ("changes", "growth"),
    [
        ({}, (0.1, 8192)),
        ({"floor_scale": 4096.0}, (0.1, 4096)),
        ({"no_rope_layers": [1, 1, 1, 1]}, (0.0, None)),
        ({"attn_temperature_tuning": False, "floor_scale": None}, (0.0, None)),
    ],
)
def test_queries_of_a_llama_4_grow_only_without_rotation(changes, growth, tmp_path):
    theirs = {"model_type": "llama4_text", "num_hidden_layers": 4} | changes
    config = hf_settings.read_config(write(tmp_path / "src", theirs))[1]
    assert (config.model.query_growth, config.model.query_growth_tokens) == growth


def test_share_of_a_mistral_4_that_rotates_is_that_of_its_heads(tmp_path):
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.2}
    read = {"model_type": "mistral4", "rope_parameters": rope | {"partial_rotary_factor": 0.5}, "head_dim": 128}
    model = hf_settings.read_config(write(tmp_path / "src", read))[1].model
    assert (model.rotary_size, model.head_size, model.query_growth, model.shorter_context) == (64, 128, 0.2, 64)
    source = write(tmp_path / "share", read | {"rope_parameters": rope | {"partial_rotary_factor": 0.25}})
    with pytest.raises(UsageError, match=r"partial_rotary_factor=0.25 is not computed here; expected 0.5"):
        hf_settings.read_config(source)
    default = hf_settings.read_config(write(tmp_path / "default", {"model_type": "mistral4"}))[1].model
    assert (default.rotary_scaling.partition(",")[0], default.shorter_context) == ("yarn:128", 8192)


OLDER = {
    "RefinedWeb": {"hidden_size": 64, "n_layer": 2, "n_head": 8, "n_head_kv": 2, "parallel_attn": True, "alibi": False},
    "RefinedWebModel": {"hidden_size": 64, "n_layer": 2, "n_head": 8, "multi_query": True, "parallel_attn": True},
}


@pytest.mark.parametrize(
    ("kind", "heads", "block"), [("RefinedWeb", 2, "parallel_two_norms"), ("RefinedWebModel", 1, "parallel")]
)
def test_older_names_of_falcon_are_read(kind, heads, block, tmp_path):
    family, config = hf_settings.read_config(write(tmp_path / "src", {"model_type": kind} | OLDER[kind]))
    assert (family, config.model.key_value_heads, config.model.block) == ("falcon", heads, block)
    with pytest.raises(UsageError, match="alibi=True is not computed here"):
        hf_settings.read_config(write(tmp_path / "rw", {"model_type": kind} | OLDER[kind] | {"alibi": True}))


def test_finetuned_yarn_is_yarn(tmp_path):
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    sources = [{"model_type": "llama", "rope_scaling": yarn | more} for more in ({}, {"finetuned": True})]
    first, second = (hf_settings.read_config(write(tmp_path / str(i), source)) for i, source in enumerate(sources))
    assert first == second
    linear = {"type": "linear", "factor": 2.0, "finetuned": True}
    source = write(tmp_path / "linear", {"model_type": "llama", "rope_scaling": linear})
    with pytest.raises(UsageError, match="finetuned=True of rope_type=linear is not known here"):
        hf_settings.read_config(source)


def test_every_causal_type_of_transformers_is_read_or_named():
    """Of transformers 5.24's classes of causal language models, in `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`."""
    names = (GOLDENS / "causal_types.txt").read_text().split()
    read = {*FAMILIES, *WRAPPERS, *hf_settings.OLDER_TYPES}
    assert len(names) == len({*names}) == 196
    assert [name for name in names if name not in read and name not in REJECTED] == []
    assert read & {*REJECTED} == set()


def test_default_layers_of_hy3_and_mellum(tmp_path):
    configs = {}
    for name, left_out in {"hy_v3": {"mlp_layer_types"}, "mellum": {"mlp_layer_types", "rope_parameters"}}.items():
        theirs = json.loads((FOLDER / name / "config.json").read_text())
        source = write(tmp_path / name, {key: value for key, value in theirs.items() if key not in left_out})
        configs[name] = hf_settings.read_config(source)[1]
    assert configs["hy_v3"].mixture.sparse_layers == (False, True)
    assert configs["mellum"].mixture.sparse_layers == (True, True, True)
    assert (configs["mellum"].model.rotary_theta, configs["mellum"].model.window_rotary_theta) == (500_000.0, 10_000.0)


def test_gpt_sw3_is_a_gpt2(tmp_path):
    kinds = "gpt-sw3", "gpt2"
    first, second = (hf_settings.read_config(write(tmp_path / kind, {"model_type": kind})) for kind in kinds)
    assert first == second


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "gemma3n_text", "lfm2", "dbrx", "jetmoe"])
def test_rejected_family_names_what_is_missing(kind, tmp_path):
    with pytest.raises(UsageError, match=f"model_type='{kind}' is not computed here; missing: {REJECTED[kind][:9]}"):
        hf_settings.read_config(write(tmp_path / "src", {"model_type": kind}))
