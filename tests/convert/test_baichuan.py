"""Baichuan 2 of 7B gives the logits of its published modeling code, which only its own repository has.

The reference computes that code's formula in NumPy, in float64.
"""

import json
import re

import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced
from shardformer.convert import baichuan, hf_settings, safetensors_files
from shardformer.errors import RunError, UsageError
from shardformer.model import Decoder
from tests.convert.test_hf import convert, edit, params_of
from tests.runs import USAGE

D, H, F, VOCAB, SEQ, LAYERS, EPS = 32, 8, 64, 61, 24, 2, 1e-5
CONFIG = {
    "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "hidden_act": "silu", "hidden_size": D,
    "intermediate_size": F, "max_position_embeddings": SEQ, "model_max_length": SEQ, "num_attention_heads": H,
    "num_hidden_layers": LAYERS, "rms_norm_eps": EPS, "vocab_size": VOCAB, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "_from_model_config": True, "z_loss_weight": 0,
    "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"}, "use_cache": True,
}  # fmt: skip
TOKENS = np.random.RandomState(1).randint(0, VOCAB, (2, SEQ)).astype(np.int32)


def draw_arrays() -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,), "lm_head.weight": (VOCAB, D)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.W_pack.weight": (3 * D, D), f"{at}.self_attn.o_proj.weight": (D, D)}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (D, F)
    return {
        name: random.normal(size=shape).astype(np.float32) / 4 + (len(shape) == 1) for name, shape in shapes.items()
    }


def write_folder(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    made = [
        safetensors_files.CreatedTensor(name, array.dtype, array.shape, lambda array=array: array)
        for name, array in draw_arrays().items()
    ]
    safetensors_files.write_tensors(folder, made, 10**9)
    return folder


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotate(x):
    """Returns x * cos + rotate_half(x) * sin of [B, H, T, K], with float32 frequencies."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / (10_000.0 ** (np.arange(0, 2 * half, 2, dtype=np.float32) / np.float32(2 * half)))
    angle = (np.arange(SEQ, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    angle = np.concatenate([angle, angle], -1)
    return x * np.cos(angle) + np.concatenate([-x[..., half:], x[..., :half]], -1) * np.sin(angle)


def compute_logits(has_normed_head: bool) -> np.ndarray:
    arrays = {name: array.astype(np.float64) for name, array in draw_arrays().items()}
    x = arrays["model.embed_tokens.weight"][TOKENS]
    for i in range(LAYERS):
        p = {name.removeprefix(f"model.layers.{i}."): array for name, array in arrays.items()}
        packed = norm(x, p["input_layernorm.weight"]) @ p["self_attn.W_pack.weight"].T
        q, k, v = np.moveaxis(packed.reshape(2, SEQ, 3, H, D // H), 2, 0).swapaxes(2, 3)
        weights = rotate(q) @ rotate(k).swapaxes(2, 3) / np.sqrt(D // H)
        weights = np.exp(np.where(np.tri(SEQ, dtype=bool), weights, -np.inf))
        attended = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(2, SEQ, D)
        x = x + attended @ p["self_attn.o_proj.weight"].T
        h = norm(x, p["post_attention_layernorm.weight"])
        gate = h @ p["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
    head = arrays["lm_head.weight"]
    head = head / np.linalg.norm(head, axis=1, keepdims=True) if has_normed_head else head
    return norm(x, arrays["model.norm.weight"]) @ head.T


def distance(folder, has_normed_head: bool) -> float:
    """Returns the largest difference of the logits on a mesh from those of the formula."""
    config = hf_settings.read_config(folder)[1].replace(mesh="2x2", batch=2)
    params: dict = {}
    for path, leaf in params_of(folder).items():
        module, _, name = path.rpartition("/")
        params.setdefault(module, {})[name] = leaf
    logits = exact.run(Decoder(traced.make_trainer(config).model).logits, params, TOKENS).outputs
    return float(np.abs(logits[..., :VOCAB] - compute_logits(has_normed_head)).max())


@pytest.mark.parametrize(("architecture", "is_normed"), [("BaichuanForCausalLM", True), ("BaiChuanForCausalLM", False)])
def test_logits_are_those_of_the_published_code(architecture, is_normed, tmp_path):
    folder = write_folder(tmp_path / "src", architectures=[architecture])
    assert distance(folder, is_normed) <= 3e-6
    assert distance(folder, not is_normed) > 1e-2


def test_baichuan_becomes_a_llama(tmp_path, capsys):
    assert convert(write_folder(tmp_path / "src"), tmp_path / "run") == 0
    assert "of a llama model" in capsys.readouterr().out
    assert convert(tmp_path / "run", tmp_path / "back", "format=hf") == 0
    expected = params_of(tmp_path / "src")
    assert {name: leaf.tobytes() for name, leaf in params_of(tmp_path / "back").items()} == {
        name: leaf.tobytes() for name, leaf in expected.items()
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "does not name the head of a baichuan; expected ['BaichuanFor"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not computed with a normed head"),
        ({"max_position_embeddings": None}, "missing: ALiBi in a Llama (Baichuan of 13B)"),
    ],
)
def test_other_baichuans_are_rejected(changes, problem, tmp_path, capsys):
    folder = write_folder(tmp_path / "src")
    edit(folder, **changes)
    assert convert(folder, tmp_path / "run") == USAGE
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        (
            "model.layers.1.self_attn.W_pack.weight",
            np.zeros((97, D), np.float32),
            "W_pack.weight is [97, 32], expected",
        ),
        ("model.layers.1.self_attn.W_pack.weight", np.zeros((), np.float32), "W_pack.weight is [], expected"),
        ("lm_head.weight", np.zeros((VOCAB, D), np.int8), "lm_head.weight is int8, expected one of float32"),
    ],
)
def test_damaged_arrays_are_rejected(name, array, problem, tmp_path, monkeypatch):
    arrays = draw_arrays() | {name: array}
    monkeypatch.setitem(globals(), "draw_arrays", lambda: arrays)
    with pytest.raises((RunError, UsageError), match=re.escape(problem)):
        params_of(write_folder(tmp_path / "src"))


def test_config_that_is_no_object_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="it is a JSON list, expected an object"):
        hf_settings.read_config(tmp_path)


def test_row_of_zeros_stays_zero(tmp_path):
    rows = np.array([[0, 0, 0], [3, 0, 4]], np.float32)
    found = baichuan.UnitRows(tmp_path, "lm_head.weight", rows.dtype, rows.shape, lambda part: rows[part])
    np.testing.assert_array_equal(found.read(), np.array([[0, 0, 0], [0.6, 0, 0.8]], np.float32))
    np.testing.assert_array_equal(found.read(slice(1, 2)), np.array([[0.6, 0, 0.8]], np.float32))
