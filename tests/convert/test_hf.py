"""Hugging Face's folders give the results of transformers, and nothing is lost in a round trip."""

import dataclasses
import functools
import json
import math
import os
import shutil
import struct

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.__main__ import main
from shardformer.analysis import dense_reference, traced
from shardformer.config import Config
from shardformer.config.names import LAYERS
from shardformer.convert import families, hf_settings, hf_state, runs, safetensors_files, weight_files
from shardformer.convert.convert_options import FLOAT_NAMES, ToHf
from shardformer.convert.families.family import read_scaling
from shardformer.errors import RunError, UsageError
from shardformer.inference import Generator, Sampling
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.training.run_folder import Run
from tests import meshes, tiers
from tests.convert.hf_models import FOLDER, LONGROPE, MODELS, NEW
from tests.runs import FAILED, USAGE

SAME, DIFFERENT = 3e-6, 1e-3


@functools.cache
def model(name, shape):
    _, config = hf_settings.read_config(FOLDER / name)
    config = config.replace(mesh=shape, batch=8)
    return Model.on(config, mesh.make(config))


def params_of(folder):
    family, config = hf_settings.read_config(folder)
    return {name: np.asarray(leaf) for name, leaf in hf_state.open_params(folder, family, config, set()).items()}


def on_devices(ours, params):
    return jax.device_put(runs.nest(ours.shapes, params), ours.shardings)


def nested_params(name):
    """Returns the folder's parameters by modules."""
    params = {}
    for path, leaf in params_of(FOLDER / name).items():
        module, _, leaf_name = path.rpartition("/")
        params.setdefault(module, {})[leaf_name] = leaf
    return params


def distance(name, shape) -> float:
    """Returns the largest difference of the logits on a mesh, in float64, from the recorded ones."""
    config = hf_settings.read_config(FOLDER / name)[1].replace(mesh=shape, batch=2)
    ours, golden = traced.make_trainer(config).model, np.load(FOLDER / name / "golden.npz")
    logits = exact.run(Decoder(ours).logits, nested_params(name), golden["tokens"]).outputs
    return float(np.abs(logits[..., : config.model.vocab] - golden["logits"]).max())


@functools.cache
def plain_model(name):
    """Returns the logits of the dense reference as a function that is traced once."""
    return jax.jit(functools.partial(dense_reference.logits, hf_settings.read_config(FOLDER / name)[1]), inline=True)


def distance_of_plain_model(name, **keys) -> float:
    golden = np.load(FOLDER / name / "golden.npz")
    config = hf_settings.read_config(FOLDER / name)[1].replace(**keys)
    logits = meshes.compute_logits(config, nested_params(name), golden["tokens"])
    return float(np.abs(logits - golden["logits"]).max())


def test_every_family_has_a_recorded_model():
    recorded = {json.loads((FOLDER / name / "config.json").read_text())["model_type"] for name in MODELS}
    assert recorded == set(families.FAMILIES)


# These have each kind of layer, heads and norms that a family has; the others split none in another way. A scaling of
# rotations or a second rotary_theta changes no split.
ON_A_MESH = (
    "bloom", "cohere", "deepseek_v3", "exaone4", "exaone_moe", "falcon_multi_query", "flex_olmo", "gemma2", "gpt_neo",
    "gpt_oss", "gptj", "granite", "hunyuan_v1_dense", "llama", "llama4", "ministral3", "nemotron", "neox_parallel",
    "olmo", "opt_350m", "phi3_long", "qwen2_moe", "smollm3", "stablelm", "xglm", "youtu",
)  # fmt: skip


@pytest.mark.parametrize("name", tiers.shorten([*ON_A_MESH, *sorted(set(MODELS) - {*ON_A_MESH})], len(ON_A_MESH)))
def test_logits_are_those_of_transformers(name):
    """On a mesh; test_greedy_continuation_token_for_token compiles programs of one device."""
    assert distance(name, "2x2") <= SAME


@pytest.mark.parametrize("name", MODELS)
def test_plain_model_has_the_logits_of_transformers(name):
    assert distance_of_plain_model(name) <= SAME


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_array_shows_in_the_logits(name):
    """And so do the keys of the model: a golden that any of them could not change would show nothing."""
    params, tokens = nested_params(name), np.load(FOLDER / name / "golden.npz")["tokens"][:1]
    right = exact.run(plain_model(name), params, tokens).outputs
    for module, leaves in params.items():
        for leaf, values in leaves.items():
            if leaf == "k_bias":
                continue  # adds the same number to all logits of a query, unless a rotation comes between
            wrong = params | {module: leaves | {leaf: np.roll(values, 1, axis=-1)}}
            changed = exact.run(plain_model(name), wrong, tokens).outputs
            assert np.abs(changed - right).max() > DIFFERENT, f"{module}/{leaf}"


WRONG_KEYS = {
    "gptj": {"activation": "gelu_exact", "rotary_theta": 9000.0},
    "gpt2": {"norm_eps": 1e-2, "activation": "relu"},
    "gpt_neo": {"attention_scale": None, "window": 8, "window_pattern": ""},
    "neox_parallel": {"activation": "gelu", "rotary_theta": 10_000.0, "rotary_dims": 8, "block": "sequential"},
    "neox_sequential": {"block": "parallel_two_norms"},
    "llama": {"norm_eps": 1e-2, "rotary_scaling": "", "rotary_theta": 10_000.0},
    "qwen2": {"rotary_scaling": "yarn:4,1,32,12,1"},
    "qwen3": {"qk_norm": "none", "rotary_theta": 9000.0},
    "olmo2": {"qk_norm": "none", "rotary_scaling": ""},
    "mixtral": {"experts_per_token": 1, "router": "sigmoid", "router_norm": False},
    "qwen3_moe": {"experts_per_token": 4, "router_norm": True},
    "qwen2_moe": {"experts_per_token": 3, "router_norm": True, "rotary_scaling": ""},
    "olmoe": {"experts_per_token": 2, "router_norm": True, "qk_norm": "none"},
    "stablelm": {"rotary_dims": 4, "norm": "rmsnorm"},
    "stablelm_parallel": {"rotary_theta": 200.0, "activation": "geglu"},
    "olmo3": {"qk_norm": "none", "rotary_scaling": "", "window_pattern": "wf", "window_rotary_theta": 200.0},
    "phi": {"rotary_dims": 4, "activation": "gelu_exact", "norm_eps": 1e-2},
    "phi3": {"window": 6},
    "ministral": {"window": 6, "window_pattern": "fw", "rotary_theta": 9000.0},
    "starcoder2": {"window": 6, "rotary_scaling": "", "activation": "gelu_exact", "norm_eps": 1e-2},
    "gemma": {"embed_scale": 1.0, "norm": "rmsnorm", "activation": "swiglu", "rotary_scaling": ""},
    "opt": {"activation": "gelu", "norm_eps": 1e-2},
    "openai_gpt": {"activation": "gelu_exact", "norm_eps": 1e-2},
    "opt_350m": {"activation": "gelu", "norm_eps": 1e-2},
    "bloom": {"activation": "gelu_exact", "positions": "none", "embed": "plain", "norm_eps": 1e-2},
    "mistral": {"window": 6, "window_pattern": "wf", "rotary_scaling": ""},
    "gemma2": {
        "window": 6,
        "window_pattern": "fw",
        "attention_cap": None,
        "logits_cap": None,
        "norm": "rmsnorm",
        "attention_scale": None,
        "embed_scale": 1.0,
    },
    "smollm3": {"window_pattern": "", "norm_eps": 1e-2, "rotary_theta": 9000.0},
    "granite": {
        "embed_scale": 1.0,
        "residual_scale": 1.0,
        "attention_scale": None,
        "logits_scale": 1.0,
        "rotary_scaling": "",
    },
    "olmo": {"norm_eps": 1e-2, "rotary_scaling": ""},
    "phi3_long": {
        "rotary_scaling": "longrope:24,1.1280092,1,1.1,1.5,3",
        "rotary_theta": 200.0,
        "norm_eps": 1e-2,
    },
    "falcon": {"rotary_theta": 9000.0, "activation": "gelu", "norm_eps": 1e-2},
    "falcon_multi_query": {"rotary_scaling": "", "activation": "gelu"},
    "mpt": {"activation": "gelu", "positions": "none", "norm_eps": 1e-2},
    "cohere": {"logits_scale": 1.0, "norm": "rmsnorm", "rotary_scaling": ""},
    "cohere2": {"window": 6, "window_pattern": "wf", "logits_scale": 1.0, "rotary_theta": 9000.0},
    "gemma3": {"window": 6, "window_rotary_theta": 1000.0, "rotary_scaling": "", "attention_scale": None},
    "codegen": {"activation": "gelu_exact", "rotary_dims": 4, "norm_eps": 1e-2},
    "gpt_bigcode": {"activation": "gelu_exact", "norm_eps": 1e-2},
    "exaone4": {"window": 6, "window_pattern": "wf", "qk_norm": "none", "rotary_scaling": ""},
    "arcee": {"activation": "relu", "rotary_scaling": ""},
    "nemotron": {"norm": "layernorm", "activation": "relu", "rotary_dims": 2},
    "jais2": {"activation": "relu", "norm": "rmsnorm"},
    "seed_oss": {"rotary_scaling": "", "norm_eps": 1e-2},
    "ernie4_5": {"rotary_theta": 10_000.0},
    "helium": {"rotary_theta": 10_000.0},
    "glm": {"rotary_dims": 2, "rotary_theta": 10_000.0},
    "glm4": {"rotary_dims": 2, "norm_eps": 1e-2},
    "cwm": {"window": 6, "window_pattern": "wf", "rotary_theta": 10_000.0},
    "granitemoe": {"experts_per_token": 1, "router_norm": False, "residual_scale": 1.0, "logits_scale": 1.0},
    "granitemoeshared": {"experts_per_token": 1, "embed_scale": 1.0},
    "hyperclovax": {"logits_scale": 0.4, "attention_scale": None},
    "vaultgemma": {"window": 6, "attention_cap": None, "logits_cap": None, "norm": "rmsnorm"},
    "glm4_moe": {"router_scale": 1.0, "router": "softmax", "qk_norm": "none"},
    "dots1": {"router_scale": 1.0, "router_norm": True},
    "solar_open": {"experts_per_token": 1, "rotary_theta": 9000.0},
    "exaone_moe": {"router_scale": 1.0, "window_pattern": "wf"},
    "minimax_m2": {"router": "softmax", "rotary_dims": 2, "qk_norm": "none"},
    "gpt_oss": {"window": 6, "window_pattern": "fw", "activation": "swiglu", "router_norm": False}
    | {"rotary_scaling": "yarn:4,0.25,1.5,12,1.138629436111989"},
    "deepseek_v2": {"router_scale": 1.0, "rotary_theta": 9000.0, "experts_per_token": 1},
    "deepseek_v3": {"attention_scale": None, "groups_per_token": 1, "expert_groups": 1, "router_norm": False}
    | {"rotary_scaling": "yarn:4,1,32,12,1"},
    "kimi_k2": {"router_scale": 1.0, "rotary_theta": 9000.0},
    "glm4_moe_lite": {"router_norm": False, "groups_per_token": 1, "rotary_scaling": ""},
    "sarvam_mla": {"router_scale": 1.0, "rotary_scaling": "yarn:4,1,32,12,1"},
    "ministral3": {"query_growth": 0.4, "rotary_scaling": "yarn:4,1,32,6,1"},
    "mistral4": {"query_growth": 0.4, "attention_scale": None, "router_norm": False, "router_scale": 1.0},
    "hunyuan_v1_dense": {"qk_norm": "head", "rotary_theta": 100.0},
    "xglm": {"positions": "none", "embed_scale": 1.0, "activation": "gelu"},
    "biogpt": {"embed_scale": 1.0, "activation": "gelu", "norm_eps": 1e-2},
    "ernie4_5_moe": {"experts_per_token": 1, "router": "sigmoid", "router_norm": False, "balance_rate": 0.0},
    "hy_v3": {"experts_per_token": 1, "router": "softmax", "router_scale": 1.0, "qk_norm": "none"},
    "aria_text": {"experts_per_token": 1, "router_norm": False, "router": "sigmoid"},
    "mellum": {"experts_per_token": 1, "router_norm": False, "window": 6, "window_rotary_theta": 500.0},
    "youtu": {"rotary_theta": 9000.0, "norm_eps": 1e-2},
    "llama4": {"window": 6, "window_chunks": False, "window_pattern": "wf", "qk_norm": "none", "router": "softmax"}
    | {"query_growth": 0.0, "query_growth_tokens": 5, "gate_inputs": False, "rotary_scaling": "llama3:4,1,4,12"},
    # Not router_norm, which scales all experts of a token: the norm after them takes that away.
    "flex_olmo": {"experts_per_token": 2, "qk_norm": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in WRONG_KEYS.items() for key in keys])
def test_another_value_of_a_key_is_another_model(name, key):
    assert distance_of_plain_model(name, **{key: WRONG_KEYS[name][key]}) > 10 * SAME


# ALiBi, rotary and learned positions, windows, long contexts and experts. test_generator.py compares the other caches
# with the plain model, whose logits are those of transformers.
CONTINUED = ("bloom", "cohere2", "gpt_neo", "gptj", "phi3_long", "qwen2_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED)
def test_greedy_continuation_token_for_token(name):
    ours, continued = model(name, "1x1"), np.load(FOLDER / name / "golden.npz")["continued"][0]
    params = on_devices(ours, params_of(FOLDER / name))
    text = Generator(ours).generate(params, continued[:-NEW], Sampling(tokens=NEW, temperature=0))
    assert text[0].tolist() == continued.tolist()


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def arrays(folder) -> dict:
    return {
        name: (tensor.dtype, tensor.shape, tensor.read().tobytes())
        for name, tensor in weight_files.find_tensors(folder).items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bitwise_with_the_tokenizer(name, tmp_path, capsys):
    source = shutil.copytree(FOLDER / name, tmp_path / "src")
    (source / "merges.txt").write_text("a b\n")
    assert convert(source, tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=hf", "dtype=bfloat16", "shard_gb=2e-5") == 0
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    assert arrays(tmp_path / "back") == arrays(source)
    assert (tmp_path / "back" / "merges.txt").read_text() == "a b\n"
    assert hf_settings.read_config(tmp_path / "back") == hf_settings.read_config(source)
    family, config = hf_settings.read_config(source)
    assert Run.open(tmp_path / "run").config.replace(out="") == config.replace(tokenizer="ids", data="")
    assert f"of a {family} model" in capsys.readouterr().out


def test_dtypes_of_options_are_those_of_folders():
    assert tuple(hf_state.FLOATS) == FLOAT_NAMES
    for name, kind in hf_state.FLOATS.items():
        assert ToHf(dtype=name).dtype == kind.name
        assert kind in safetensors_files.DTYPES.values()
    with pytest.raises(UsageError, match="dtype is one of float32, bfloat16, float16; got 'float64'"):
        ToHf(dtype="float64")


def test_codes_of_a_folder_are_made_layer_by_layer(tmp_path, capsys, monkeypatch):
    assert convert(FOLDER / "llama", tmp_path / "floats") == 0
    assert convert(tmp_path / "floats", tmp_path / "expected", "weights=nf4") == 0
    capsys.readouterr()
    copied, copy = [], hf_state._copy_part

    def log_copy(tensor, stored, part, target):
        copied.append((part.ours, target.ndim, stored.row))
        return copy(tensor, stored, part, target)

    monkeypatch.setattr(hf_state, "_copy_part", log_copy)
    assert convert(FOLDER / "llama", tmp_path / "codes", "weights=nf4") == 0
    assert ", stored as weights=nf4\n" in capsys.readouterr().out
    up = f"{LAYERS}/up"
    layers = [(up, 2, 0), (up, 2, 1)]
    assert [copy for copy in copied if copy[0] == up] == 2 * layers  # for the scales, and for the codes
    found, expected, floats = (
        next((tmp_path / name).rglob("arrays.npy")).read_bytes() for name in ("codes", "expected", "floats")
    )
    assert found == expected != floats


def test_published_weights_are_no_run_that_was_trained_for_codes(tmp_path, capsys):
    assert convert(FOLDER / "gpt2", tmp_path / "run", "quantize_aware=int4") == USAGE
    assert "give quantize_aware=none, and quantize_aware=int4 to `train base=" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("glm4_moe", "model.layers.2.eh_proj.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight"),
        ("mellum", "mtp.fc.weight"),
    ],
)
def test_layers_that_predict_further_are_not_read(name, array, tmp_path):
    folder = shutil.copytree(FOLDER / name, tmp_path / "src")
    whole = params_of(folder)
    tensors = weight_files.find_tensors(FOLDER / name)
    tensors[array] = tensors["model.layers.1.self_attn.o_proj.weight"]
    made = [safetensors_files.CreatedTensor(name, t.dtype, t.shape, t.read) for name, t in tensors.items()]
    safetensors_files.write_tensors(folder, made, 10**9)
    assert {n: leaf.tobytes() for n, leaf in params_of(folder).items()} == {n: e.tobytes() for n, e in whole.items()}


def test_layers_beyond_the_last_are_rejected(tmp_path):
    folder = shutil.copytree(FOLDER / "llama", tmp_path / "src")
    edit(folder, num_hidden_layers=1)
    with pytest.raises(UsageError, match=r"which no llama model with this config\.json has"):
        params_of(folder)


def test_float16_and_float32(tmp_path):
    assert convert(FOLDER / "gptj", tmp_path / "run") == 0
    for dtype, is_exact in (("float32", True), ("float16", False)):
        assert convert(tmp_path / "run", tmp_path / dtype, "format=hf", f"dtype={dtype}") == 0
        found, expected = params_of(tmp_path / dtype), params_of(FOLDER / "gptj")
        for name, leaf in expected.items():
            np.testing.assert_allclose(found[name], leaf, atol=0 if is_exact else 1e-3)


def test_an_array_too_large_for_float16_is_named(tmp_path):
    params = params_of(FOLDER / "gpt2")
    params["transformer/layers/up_bias"][1, 3] = 70_000
    config = hf_settings.read_config(FOLDER / "gpt2")[1]
    with pytest.raises(UsageError, match=r"h.1.mlp.c_fc.bias has a weight of 70000, too large for float16"):
        hf_state.write_params(tmp_path, "gpt2", config, params, "float16", 10**9)


def test_models_without_a_head_and_with_masks(tmp_path):
    """As GPT2Model saves, and as versions of old did."""
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "src")
    tensors = weight_files.find_tensors(FOLDER / "gpt2")
    made = [
        safetensors_files.CreatedTensor(name.removeprefix("transformer."), tensor.dtype, tensor.shape, tensor.read)
        for name, tensor in tensors.items()
    ]
    mask = np.ones((1, 1, 4, 4), np.uint8)
    made.append(safetensors_files.CreatedTensor("h.0.attn.bias", mask.dtype, mask.shape, lambda: mask))
    safetensors_files.write_tensors(folder, made, 10**9)
    found, expected = params_of(folder), params_of(FOLDER / "gpt2")
    assert {name: leaf.tobytes() for name, leaf in found.items()} == {n: e.tobytes() for n, e in expected.items()}


def test_weights_that_are_not_finite_are_said(tmp_path, capsys):
    folder = shutil.copytree(FOLDER / "llama", tmp_path / "src")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-2:] = b"\xc0\x7f"  # NaN in bfloat16
    (folder / "model.safetensors").write_bytes(content)
    assert convert(folder, tmp_path / "run") == 0
    assert "warning: 1 arrays have weights that are NaN or infinite, model.norm.weight" in capsys.readouterr().out


def test_a_single_file_rules_over_an_index(tmp_path):
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "src")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    assert arrays(folder) == arrays(FOLDER / "gpt2")


def header_of(path):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def damage(folder, name="transformer.ln_f.bias", **fields):
    header, data = header_of(folder / "model.safetensors")
    header[name] = {key: value for key, value in (header[name] | fields).items() if value is not None}
    write_header(folder / "model.safetensors", header, data)


def overlap(folder):
    header, data = header_of(folder / "model.safetensors")
    names = [name for name, entry in header.items() if name != "__metadata__" and entry["shape"] == [32]]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    write_header(folder / "model.safetensors", header, data)


def index(folder, places):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def only_pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("status", "message", "harm"),
    [
        (FAILED, "its header should have 18446744073709551615 bytes",
         lambda it: (it / "model.safetensors").write_bytes(b"\xff" * 100)),
        (FAILED, "its header should have -1 bytes", lambda it: (it / "model.safetensors").write_bytes(b"\0")),
        (FAILED, "model.safetensors is damaged", lambda it: write_header(it / "model.safetensors", b"[" * 10**5, b"")),
        (USAGE, "has more arrays than the limit of 100,000",
         lambda it: write_header(it / "model.safetensors", {str(i): {} for i in range(10**5)}, b"")),
        (USAGE, "has a header of 16,777,217 bytes, more than the limit of 16,777,216",
         lambda it: write_header(it / "model.safetensors", b" " * (2**24 + 1), b"")),
        (FAILED, "a name appears twice", lambda it: write_header(it / "model.safetensors", b'{"a":1,"a":2}', b"")),
        (FAILED, "it is not a JSON object", lambda it: write_header(it / "model.safetensors", b"[]", b"")),
        (FAILED, "begins at byte", overlap),
        (FAILED, "which does not fit its shape and dtype", lambda it: damage(it, shape=[2**40, 2**40])),
        (FAILED, "which does not fit its shape and dtype", lambda it: damage(it, data_offsets=[0, 2])),
        (FAILED, "is described as", lambda it: damage(it, shape=[-32])),
        (FAILED, "is described as", lambda it: damage(it, shape=[True])),
        (FAILED, "is described as", lambda it: damage(it, shape="32")),
        (FAILED, "is described as", lambda it: damage(it, data_offsets=None)),
        (USAGE, "has dtype 'F8_E4M3'; known are", lambda it: damage(it, dtype="F8_E4M3")),
        (FAILED, "its arrays end at byte",
         lambda it: (it / "model.safetensors").write_bytes((it / "model.safetensors").read_bytes()[:-64])),
        (USAGE, "names '../other.safetensors': a file of the index lies in its own folder",
         lambda it: index(it, {"a": "../other.safetensors"})),
        (USAGE, "names '/etc/passwd'", lambda it: index(it, {"a": "/etc/passwd"})),
        (FAILED, "weight_map is not an object", lambda it: index(it, [1])),
        (FAILED, "'a' is not in part.safetensors", lambda it: index(it, {"a": "part.safetensors"})),
        (FAILED, "other.safetensors cannot be read", lambda it: index(it, {"a": "other.safetensors"})),
        (USAGE, "pytorch_model.bin is not in PyTorch's zip format", only_pickled),
        (USAGE, "model.h5 is in a format that is not read",
         lambda it: (it / "model.safetensors").rename(it / "model.h5")),
        (USAGE, "has no weights", lambda it: (it / "model.safetensors").unlink()),
        (USAGE, "transformer.wte.weight is [61, 32], and config.json makes it [62, 32]",
         lambda it: edit(it, vocab_size=62)),
        (FAILED, "lacks transformer.h.2.ln_1.weight and 11 more", lambda it: edit(it, n_layer=3)),
        (USAGE, "has transformer.h.1.attn.c_attn.bias and 11 more, which no", lambda it: edit(it, n_layer=1)),
        (USAGE, "model_type='made_up' is not known; there are gptj, gpt2", lambda it: edit(it, model_type="made_up")),
        (USAGE, "model_type=['gpt2'] is not known", lambda it: edit(it, model_type=["gpt2"])),
        (USAGE, "activation_function='mish' is not an activation", lambda it: edit(it, activation_function="mish")),
        (USAGE, "scale_attn_by_inverse_layer_idx=True is not computed here",
         lambda it: edit(it, scale_attn_by_inverse_layer_idx=True)),
        (USAGE, "quantization_config={'bits': 4} is not known here",
         lambda it: edit(it, quantization_config={"bits": 4})),
        (FAILED, "config.json is damaged", lambda it: (it / "config.json").write_text('["model_type"]')),
        (FAILED, "config.json is damaged", lambda it: (it / "config.json").write_text('"model_type"')),
        (USAGE, "cannot be converted; expected a run, a Hugging Face folder", lambda it: as_pipe(it / "config.json")),
        (FAILED, "has 28 arrays, fewer than the 100000 layers", lambda it: edit(it, n_layer=10**5)),
        (USAGE, "vocab_size=0: the number of tokens is missing", lambda it: edit(it, vocab_size=0)),
        (USAGE, "heads takes int, got '8'", lambda it: edit(it, n_head="8")),
        (USAGE, "d_model=32 does not divide into heads=5", lambda it: edit(it, n_head=5)),
    ],
)  # fmt: skip
def test_hostile_or_damaged_folders_are_refused_in_one_line(status, message, harm, tmp_path, capsys):
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "src")
    harm(folder)
    assert convert(folder, tmp_path / "dst") == status
    error = capsys.readouterr().err
    assert error.startswith({USAGE: "shardformer: error: ", FAILED: "shardformer: failed: "}[status])
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    ("name", "message", "changes"),
    [
        ("gpt_neo", "window_size=0 cannot be a window", {"window_size": 0}),
        ("gpt_neo", "num_layers=1000000000000 is out of range", {"num_layers": 10**12}),
        ("mistral", "sliding_window=0 cannot be a window", {"sliding_window": 0}),
        ("mistral", "layer_types=['full_attention'] is not known here", {"layer_types": ["full_attention"]}),
        ("mistral", "num_hidden_layers=1000000000000 is out of range", {"num_hidden_layers": 10**12}),
        ("gemma2", "layer_types=['full_attention'] is not computed here", {"layer_types": ["full_attention"]}),
        ("gemma2", "layer_types=['chunked_attention',", {"layer_types": ["chunked_attention"] * 2}),
        ("gemma2", "sliding_window=None cannot be a window", {"sliding_window": None}),
        ("gemma2", "attn_logit_softcapping=0 cannot bound logits", {"attn_logit_softcapping": 0}),
        ("gemma2", "query_pre_attn_scalar=9.5 is not computed here", {"query_pre_attn_scalar": 9.5}),
        ("gemma2", "hidden_activation='gelu' is not an activation", {"hidden_activation": "gelu"}),
        ("gemma2", "use_bidirectional_attention=True is not computed", {"use_bidirectional_attention": True}),
        ("gemma2", "attention_bias=True is not computed", {"attention_bias": True}),
        ("gemma3", "final_logit_softcapping=-1.0 cannot bound logits", {"final_logit_softcapping": -1.0}),
        ("gemma3", "sliding_window_pattern=0 is not computed", {"layer_types": None, "sliding_window_pattern": 0}),
        ("gemma3", "rope_parameters has 'rope_theta'", {"rope_parameters": {"rope_theta": 10.0}}),
        ("gemma3", "only full layers may have a scaling here",
         {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}),
        ("mellum", "has no rope_theta of full_attention",
         {"rope_parameters": {"sliding_attention": {"rope_theta": 10.0}}}),
        ("olmo3", "truncate=False is not computed by OLMo 3; expected True",
         {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}}),
        ("gpt_oss", "swiglu_limit=3.0 is not computed here; expected 7.0", {"swiglu_limit": 3.0}),
        ("deepseek_v3", "quantization_config={'quant_method': 'fp8'} is not computed here; expected None",
         {"quantization_config": {"quant_method": "fp8"}}),
        ("deepseek_v3", "num_key_value_heads=4 is not computed here; expected 8", {"num_key_value_heads": 4}),
        ("deepseek_v3", "mscale=1.5 of rope_type=linear is not known here",
         {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.5}}),
        ("deepseek_v2", "topk_method='noaux_tc' is not computed here; expected 'gr", {"topk_method": "noaux_tc"}),
        ("gpt_oss", "num_local_experts=0 is not computed here", {"num_local_experts": 0}),
        ("llama", "rope_type='dynamic' is not a scaling", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama", "rope_type=longrope needs short_factor and long", {"rope_parameters": {"rope_type": "longrope"}}),
        ("qwen2", "use_sliding_window=True is not computed here", {"use_sliding_window": True}),
        ("qwen2", "layer_types has sliding_attention", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3", "attention_bias=True is not computed here", {"attention_bias": True}),
        ("qwen3", "use_sliding_window=True is not computed here", {"use_sliding_window": True}),
        ("olmo2", "attention_bias=True is not computed here", {"attention_bias": True}),
        ("olmo2", "partial_rotary_factor=0.5 is not computed", {"partial_rotary_factor": 0.5}),
        ("stablelm", "qk_layernorm=True is not computed here", {"qk_layernorm": True}),
        ("stablelm", "partial_rotary_factor=0.1 rotates no dimension of heads of 4",
         {"rope_parameters": {"partial_rotary_factor": 0.1}}),
        ("phi3", "rope_type='llama3' is not computed for Phi-3", {"rope_parameters": {"rope_type": "llama3"}}),
        ("phi3", "rope_type=longrope needs short_factor and long_factor", {"rope_parameters": {"rope_type": "su"}}),
        ("phi3_long", "must have 8 numbers after ATTENTION", {"rope_parameters": LONGROPE}),
        ("phi3", "full_attn_mod=2 is not computed here", {"full_attn_mod": 2}),
        ("mixtral", "num_local_experts=0 is not computed here; expected at least 1", {"num_local_experts": 0}),
        ("qwen3_moe", "decoder_sparse_step=0 is not computed here", {"decoder_sparse_step": 0}),
        ("qwen3_moe", "mlp_only_layers=['1'] is not computed here", {"mlp_only_layers": ["1"]}),
        ("qwen3_moe", "leave none of 2 layers with experts", {"mlp_only_layers": [0, 1]}),
        ("qwen2_moe", "qkv_bias=False is not computed here", {"qkv_bias": False}),
        ("qwen2_moe", "use_sliding_window=True is not computed here", {"use_sliding_window": True}),
        ("qwen2_moe", "shared_expert_intermediate_size=0 is not", {"shared_expert_intermediate_size": 0}),
        ("olmoe", "clip_qkv=8.0 is not computed here", {"clip_qkv": 8.0}),
        ("olmoe", "head_dim=8 is not computed by this family", {"head_dim": 8}),
        ("smollm3", "no_rope_layers=[1] is not computed here", {"no_rope_layers": [1]}),
        ("smollm3", "no_rope_layers=[1, 2] is not computed here", {"no_rope_layers": [1, 2]}),
        ("smollm3", "no_rope_layer_interval=0 is not computed", {"no_rope_layers": None, "no_rope_layer_interval": 0}),
        ("smollm3", "use_sliding_window=True is not computed here", {"use_sliding_window": True}),
        ("granite", "logits_scaling=0 is not computed here", {"logits_scaling": 0}),
        ("granite", "mlp_bias=True is not computed here", {"mlp_bias": True}),
        ("olmo", "clip_qkv=8.0 is not computed here", {"clip_qkv": 8.0}),
        ("falcon", "alibi=True is not computed here", {"alibi": True}),
        ("falcon", "bias=True is not computed here", {"bias": True}),
        ("falcon", "parallel_attn=False contradicts new_decoder_architecture=True", {"parallel_attn": False}),
        ("falcon_multi_query", "num_ln_in_parallel_attn=2 is not computed here", {"num_ln_in_parallel_attn": 2}),
        ("mpt", "attn_config: clip_qkv=8 is not computed here", {"attn_config": {"clip_qkv": 8}}),
        ("mpt", "attn_config: rope=True is not known here", {"attn_config": {"rope": True}}),
        ("mpt", "expansion_ratio=2 is not computed here", {"expansion_ratio": 2}),
        ("mpt", "n_heads=6 is not computed here; expected a power of 2", {"n_heads": 6}),
        ("cohere", "use_qk_norm=True is not computed here", {"use_qk_norm": True}),
        ("cohere", "logit_scale=None is not computed here", {"logit_scale": None}),
        ("cohere2", "sliding_window=None cannot be a window", {"sliding_window": None}),
        ("cohere2", "sliding_window_pattern=0 is not computed", {"layer_types": None, "sliding_window_pattern": 0}),
        ("phi3", "sliding_window=0 cannot be a window", {"sliding_window": 0}),
        ("llama4", "layer_types=['full_attention'] is not computed", {"layer_types": ["full_attention"]}),
        ("llama4", "full_attention for layers without rotary positions", {"layer_types": ["chunked_attention"] * 3}),
        ("llama4", "moe_layers leave none of 3 layers with experts", {"moe_layers": []}),
        ("llama4", "moe_layers=[1, 9] is not computed here; expected a list of layers below 3", {"moe_layers": [1, 9]}),
        ("llama4", "floor_scale=0.5 is not computed here", {"floor_scale": 0.5}),
        ("llama4", "interleave_moe_layer_step=0 is not computed here", {"interleave_moe_layer_step": 0}),
        ("llama4", "attention_chunk_size=0 cannot be a window", {"attention_chunk_size": 0}),
        ("bloom", "n_inner=60 is not computed here; expected 4 * hidden_size = 128", {"n_inner": 60}),
        ("bloom", "n_embed=64 contradicts hidden_size=32", {"n_embed": 64}),
        ("llama", "attention_bias=True is not computed here; expected False", {"attention_bias": True}),
        ("llama", "hidden_act='gelu' is not an activation", {"hidden_act": "gelu"}),
        ("gptj", "tie_word_embeddings=True is not computed here", {"tie_word_embeddings": True}),
        ("gptj", "rotary_dim=None", {"rotary_dim": None}),
        ("neox_parallel", "attention_bias=False is not computed here", {"attention_bias": False}),
    ],
)  # fmt: skip
def test_values_that_are_not_computed_are_named(name, message, changes, tmp_path):
    folder = shutil.copytree(FOLDER / name, tmp_path / "src")
    edit(folder, **changes)
    with pytest.raises(UsageError, match=r"config\.json: ") as refusal:
        hf_settings.read_config(folder)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block": "parallel", "positions": "t5", "bias": "ff"}, "positions=t5"),
        ({"norm": "rmsnorm", "bias": "ff", "positions": "rotary"}, "norm=rmsnorm"),
        ({"embed": "bias", "tied": True}, "embed=bias"),
        ({"activation": "swiglu"}, "activation=swiglu"),
        ({"head_dim": 6, "activation": "gelu"}, "head_dim=6"),
        ({"norm": "rmsnorm_plus_one", "block": "sequential_post_norms"}, "norm=rmsnorm_plus_one"),
        (
            {"positions": "alibi", "bias": "none", "block": "sequential", "heads": 12, "d_model": 48, "tied": True},
            "positions=alibi",
        ),
        ({"logits_scale": 2.0, "positions": "learned"}, "logits_scale=2.0"),
    ],
)
def test_a_run_that_no_family_computes_is_refused_by_key(changes, named):
    with pytest.raises(UsageError, match="no Hugging Face family has") as refusal:
        hf_settings.choose_family(Config.of(vocab=61, **changes))
    assert named in str(refusal.value)


@pytest.mark.parametrize("name", MODELS)
def test_the_family_of_a_model_is_found_again(name):
    family, config = hf_settings.read_config(FOLDER / name)
    assert hf_settings.choose_family(config, family) == family  # without its name, an OPT is a GPT-2


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        *((name, {"window_pattern": "wn"}, "window_pattern=wn") for name in ("ministral", "gemma2", "gpt_oss")),
        *((name, {"window_pattern": "wn", "rotary_scaling": ""}, "window_pattern=wn") for name in ("gemma3", "olmo3")),
        ("olmo3", {"rotary_scaling": "yarn_untruncated:4,1,32,12,1"}, "rotary_scaling=yarn_untruncated:4,1,32,12,1"),
        ("gpt_oss", {"sinks": False}, "sinks=false"),
        ("gpt_oss", {"window_chunks": True}, "window_chunks=true"),
        ("llama4", {"window_chunks": False}, "window_chunks=false"),
        ("llama4", {"query_growth_tokens": None}, "query_growth=0.8"),
        ("llama4", {"shared_width": 8}, "shared_width=8"),
        ("gpt_oss", {"expert_bias": False}, "expert_bias=false"),
        ("gpt_oss", {"bias": "qkv"}, "bias=qkv"),
    ],
)
def test_a_change_that_a_family_lacks_is_refused_by_key(name, changes, named):
    family, config = hf_settings.read_config(FOLDER / name)
    with pytest.raises(UsageError, match="no Hugging Face family has") as refusal:
        hf_settings.choose_family(config.replace(**changes), family)
    assert named in str(refusal.value)


def test_a_mistral_without_windows_stays_one(tmp_path):
    source = shutil.copytree(FOLDER / "mistral", tmp_path / "src")
    edit(source, sliding_window=None)
    assert convert(source, tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=hf") == 0
    assert hf_settings.read_config(tmp_path / "back") == hf_settings.read_config(source)
    assert hf_settings.choose_family(Run.open(tmp_path / "run").config) == "llama"


def test_a_bias_in_place_of_scaled_embeddings_has_no_family():
    config = hf_settings.read_config(FOLDER / "gemma2")[1].replace(tied=False)
    assert hf_settings.choose_family(config) == "gemma2"
    with pytest.raises(UsageError, match="no Hugging Face family has embed=bias"):
        hf_settings.choose_family(config.replace(embed="bias"))


def test_a_missing_array_of_the_layout_shows(monkeypatch):
    layer = families.FAMILIES["gptj"].layer
    short = dataclasses.replace(families.FAMILIES["gptj"], layer=lambda c: layer(c)[:-1])
    monkeypatch.setitem(families.FAMILIES, "gptj", short)
    with pytest.raises((RuntimeError, RunError, UsageError)):
        params_of(FOLDER / "gptj")


def test_numbers_that_only_a_damaged_config_has(tmp_path):
    """Creates no list of 10**12 attention types, and raises no OverflowError."""
    for name, message, changes in (
        ("gpt_neo", "does not name num_layers=2 layers", {"attention_types": [[["local"], 10**12]]}),
        ("neox_parallel", "is damaged: OverflowError", {"rotary_pct": math.inf, "rope_parameters": None}),
        ("llama", "is damaged: OverflowError", {"rope_theta": 10**400, "rope_parameters": None}),
    ):
        folder = shutil.copytree(FOLDER / name, tmp_path / name)
        edit(folder, **changes)
        with pytest.raises(UsageError, match=message):
            hf_settings.read_config(folder)


def test_a_rope_factor_keeps_all_of_its_digits():
    assert read_scaling({"rope_type": "linear", "factor": 8 / 3}, 24) == {"rotary_scaling": f"linear:{8 / 3!r}"}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for context, written in (2**20, "1048576.0"), (8192, "8192"):
        rope = llama3 | {"original_max_position_embeddings": context}
        assert read_scaling(rope, 24) == {"rotary_scaling": f"llama3:8,1,4,{written}"}
