"""GPT-J as a fork of transformers had it, a GPT-Neo with `rotary` and `jax`, is read as GPT-J.

The reference is the fork's formula in NumPy, on the arrays under the fork's names.
"""

import json

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert import hf_settings, safetensors_files, weight_files
from shardformer.convert.safetensors_files import CreatedTensor
from shardformer.errors import UsageError
from tests import meshes
from tests.convert.hf_models import FOLDER
from tests.convert.test_hf import SAME, params_of
from tests.runs import FAILED, USAGE

SOURCE = FOLDER / "gptj"
HEADS, ROTARY, EPSILON = 8, 4, 1e-5
KEYS = {
    "model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"], "rotary": True, "jax": True, "rotary_dim": ROTARY,
    "attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2, "window_size": 256, "num_layers": 2,
    "num_heads": HEADS, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 24, "vocab_size": 61,
    "activation_function": "gelu_new", "layer_norm_epsilon": EPSILON, "resid_dropout": 0, "embed_dropout": 0,
    "attention_dropout": 0, "model_device": "cpu", "model_dtype": "fp32", "full_bf16": False,
}  # fmt: skip


def read_fork_arrays() -> dict[str, np.ndarray]:
    """Returns the arrays of the recorded GPT-J under the fork's names, with the buffers that it saves."""
    names = {"attn.": "attn.attention.", "mlp.fc_in": "mlp.c_fc", "mlp.fc_out": "mlp.c_proj"}
    arrays = {}
    for name, tensor in weight_files.find_tensors(SOURCE).items():
        for theirs, of_fork in names.items():
            name = name.replace(theirs, of_fork)
        arrays[name] = np.float32(tensor.read())
    for layer in range(KEYS["num_layers"]):
        at = f"transformer.h.{layer}.attn.attention"
        arrays |= {f"{at}.{name}": np.ones((24, 1), np.float32) for name in ("sin", "cos", "bias")}
        arrays |= {f"{at}.{name}": np.ones(1, np.float32) for name in ("scale_attn", "masked_bias")}
    return arrays


@pytest.fixture
def fork(tmp_path):
    """The recorded GPT-J as the fork would have saved it."""
    folder = tmp_path / "fork"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KEYS))
    write_arrays(folder, read_fork_arrays())
    return folder


def write_arrays(folder, arrays) -> None:
    created = [
        CreatedTensor(name, values.dtype, values.shape, lambda values=values: values) for name, values in arrays.items()
    ]
    safetensors_files.write_tensors(folder, created, 10**9)


def change(folder, *removed, **keys) -> None:
    kept = {key: value for key, value in KEYS.items() if key not in removed}
    (folder / "config.json").write_text(json.dumps(kept | keys))


def compute_logits(arrays, tokens_BT, is_jax=True):
    """Returns the fork's logits; `is_jax` divides attention by the root of the head's size."""
    w = {name: np.float64(values) for name, values in arrays.items()}
    T, K = tokens_BT.shape[1], KEYS["hidden_size"] // HEADS
    angle = np.repeat(np.outer(np.arange(T), 10_000.0 ** -(np.arange(0, ROTARY, 2) / ROTARY)), 2, axis=1)[:, None]

    def normalise(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def split(x):
        return x.reshape(*x.shape[:2], HEADS, K)

    def rotate(x):
        turned, rest = x[..., :ROTARY], x[..., ROTARY:]
        other = np.stack([-turned[..., 1::2], turned[..., ::2]], -1).reshape(turned.shape)
        return np.concatenate([turned * np.cos(angle) + other * np.sin(angle), rest], -1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    h = w["transformer.wte.weight"][tokens_BT]
    for layer in range(KEYS["num_layers"]):
        at = f"transformer.h.{layer}"
        x = normalise(h, f"{at}.ln_1")
        q, k, v = (split(x @ w[f"{at}.attn.attention.{name}_proj.weight"].T) for name in "qkv")
        scores = np.einsum("bthk,bshk->bhts", rotate(q), rotate(k)) / (np.sqrt(K) if is_jax else 1)
        scores = np.exp(np.where(np.tril(np.ones((T, T))) > 0, scores, -np.inf))
        mixed = np.einsum("bhts,bshk->bthk", scores / scores.sum(-1, keepdims=True), v).reshape(h.shape)
        up = gelu(x @ w[f"{at}.mlp.c_fc.weight"].T + w[f"{at}.mlp.c_fc.bias"])
        h = h + mixed @ w[f"{at}.attn.attention.out_proj.weight"].T
        h = h + up @ w[f"{at}.mlp.c_proj.weight"].T + w[f"{at}.mlp.c_proj.bias"]
    return normalise(h, "transformer.ln_f") @ w["lm_head.weight"].T + w["lm_head.bias"]


def test_logits_are_those_of_the_forks_formula(fork):
    tokens = np.load(SOURCE / "golden.npz")["tokens"]
    params: dict = {}
    for name, values in params_of(fork).items():
        module, _, leaf = name.rpartition("/")
        params.setdefault(module, {})[leaf] = values
    got = meshes.compute_logits(hf_settings.read_config(fork)[1], params, tokens)
    arrays = read_fork_arrays()
    assert np.abs(got - compute_logits(arrays, tokens)).max() <= SAME
    assert np.abs(got - compute_logits(arrays, tokens, is_jax=False)).max() > 100 * SAME


def test_the_run_is_that_of_transformers_gptj(fork):
    model, expected = hf_settings.read_model(fork), hf_settings.read_model(SOURCE)
    assert (model.family, model.config) == (expected.family, expected.config)
    got, params = params_of(fork), params_of(SOURCE)
    assert got.keys() == params.keys()
    for name, values in params.items():
        np.testing.assert_array_equal(got[name], values)


@pytest.mark.parametrize(
    ("removed", "keys"),
    [
        ("attention_types", {}),
        ("attention_layers", {}),
        ("num_layers", {"num_hidden_layers": 2}),
        ("num_heads", {"num_attention_heads": HEADS}),
        ("num_layers", {"n_layer": 2}),
        ("hidden_size", {"n_embd": 64}),
    ],
    ids=str,
)
def test_each_value_has_two_names(fork, removed, keys):
    change(fork, removed, **keys)
    assert hf_settings.read_config(fork) == hf_settings.read_config(SOURCE)


def test_defaults_are_those_of_the_forks_class(tmp_path):
    """Sizes that a file leaves out are GPT-Neo's, not those of transformers' GPT-J."""
    keys = {"model_type": "gpt_neo", "rotary": True, "jax": True, "rotary_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"attention_types": [[["global"], 24]]}))
    model = hf_settings.read_config(tmp_path)[1].model
    assert (model.vocab, model.d_model, model.layers, model.heads, model.seq) == (50257, 2048, 24, 16, 2048)


LOCAL = "is not computed for GPT-J; expected 2 layers, all 'global'"


@pytest.mark.parametrize(
    ("removed", "keys", "message"),
    [
        ([], {"jax": False}, "rotary=True is not computed here"),
        ([], {"attention_types": [[["global", "local"], 1]]}, f"attention_types=[[['global', 'local'], 1]] {LOCAL}"),
        ([], {"attention_layers": ["global", "local"]}, f"attention_layers=['global', 'local'] {LOCAL}"),
        (["attention_types"], {"attention_layers": ["local"] * 2}, f"attention_layers=['local', 'local'] {LOCAL}"),
        ([], {"attention_layers": ["global"] * 3}, f"attention_layers=['global', 'global', 'global'] {LOCAL}"),
        ([], {"attention_types": [[["global"], 1]]}, "attention_types=[[['global'], 1]] does not name num_layers=2"),
        (["attention_types", "attention_layers"], {}, "attention_types is missing: the default of GPT-Neo has windows"),
        ([], {"attention_types": [[1]]}, "config.json is damaged"),
        ([], {"rotary_dim": None}, "rotary_dim=None: the number of dimensions that rotate is missing"),
        (["rotary_dim"], {}, "rotary_dim=None: the number of dimensions that rotate is missing"),
        ([], {"tie_word_embeddings": True}, "tie_word_embeddings=True is not computed here; expected False"),
        ([], {"n_layer": 3}, "num_layers=2 contradicts n_layer=3"),
        ([], {"num_hidden_layers": 3}, "num_hidden_layers=3 contradicts num_layers=2"),
    ],
)
def test_other_forms_of_the_fork_are_rejected(fork, removed, keys, message, tmp_path, capsys):
    change(fork, *removed, **keys)
    assert main(["convert", str(fork), str(tmp_path / "run")]) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("jax", "rotary=True is not computed here"),
        ("num_heads", "ignore_config=num_heads: the model cannot be built without it"),
        ("n_head", "ignore_config=n_head: config.json has no such key"),
    ],
)
def test_ignored_keys_are_those_of_the_file(fork, key, message):
    assert hf_settings.read_model(fork, ["window_size"]) == hf_settings.read_model(fork)
    with pytest.raises(UsageError, match=message):
        hf_settings.read_model(fork, [key])


@pytest.mark.parametrize(("kind", "name"), [("fork", "mlp.c_fc.bias"), ("gptj", "mlp.fc_in.bias")])
def test_missing_array_has_the_name_of_the_folders_others(fork, tmp_path, capsys, kind, name):
    arrays = read_fork_arrays()
    if kind == "gptj":
        (fork / "config.json").write_bytes((SOURCE / "config.json").read_bytes())
        arrays = {array: np.float32(tensor.read()) for array, tensor in weight_files.find_tensors(SOURCE).items()}
    del arrays[f"transformer.h.1.{name}"]
    write_arrays(fork, arrays)
    assert main(["convert", str(fork), str(tmp_path / "run")]) == FAILED
    assert f"lacks transformer.h.1.{name};" in capsys.readouterr().err


def test_a_gpt_neo_has_no_arrays_of_the_fork(fork, tmp_path, capsys):
    """Without `rotary` the same arrays are those of a GPT-Neo that lacks its norms and positions."""
    change(fork, rotary=False, rotary_dim=None)
    assert main(["convert", str(fork), str(tmp_path / "run")]) == FAILED
    assert "lacks transformer.wpe.weight" in capsys.readouterr().err
