"""llama.cpp beside us: what it cannot compute is said, and what it computes are the tokens of our model."""

import jax
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.bench import llama_cpp_twin
from shardformer.config import Config
from shardformer.layout import mesh
from shardformer.model import Model
from tests.convert.test_gguf import read_gguf
from tests.shared import drawn

LLAMA = {
    "layers": 1, "d_model": 32, "heads": 2, "vocab": 40, "seq": 32, "batch": 1, "mesh": "1x1", "norm": "rmsnorm",
    "activation": "swiglu", "block": "sequential", "bias": "none", "tied": True, "head_bias": False,
}  # fmt: skip


def make(**changed) -> tuple[Config, dict]:
    c = Config.of(**LLAMA | changed)
    return c, drawn(c, 0)


@pytest.mark.parametrize(("weights", "code"), [("float", 0), ("int8", 8), ("int4", 2), ("nf4", 2)])
def test_files_have_the_weights_kind_and_a_word_for_each_id(weights, code, tmp_path):
    c, params = make(weights=weights)
    llama_cpp_twin._write(tmp_path / "a.gguf", c, params)
    keys, arrays = read_gguf(tmp_path / "a.gguf")
    assert keys["tokenizer.ggml.model"] == "rwkv"  # other kinds have an end of text, which llama.cpp never chooses
    assert keys["tokenizer.ggml.tokens"] == [f"<{number}>" for number in range(40)]
    assert arrays["blk.0.attn_q.weight"][0] == code
    assert arrays["blk.0.attn_norm.weight"][0] == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"activation": "relu2"},
            "llama.cpp's format is not written for a model with activation=relu2",
        ),
        ({}, "xllamacpp is not installed; pip install xllamacpp"),
    ],
)
def test_it_says_why_it_cannot_run(changed, reason, monkeypatch):
    monkeypatch.setattr(llama_cpp_twin.importlib.util, "find_spec", lambda name: None)
    assert reason in llama_cpp_twin.why_not(Config.of(**LLAMA | changed))


def test_another_backend_than_a_cpu_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert llama_cpp_twin.why_not(Config.of(**LLAMA)) == "xllamacpp's wheel computes on CPUs, and this is a gpu"


def test_a_peer_that_is_asked_for_must_run(capsys):
    words = [f"{key}={value}" for key, value in LLAMA.items() if key != "batch"]
    words = [word.replace("swiglu", "relu2") for word in words]
    assert main(["bench", "generate", "preset=tiny", *words, "peers=llama_cpp", "rows=1", "tokens=2"]) == 2
    assert "peers=llama_cpp: llama.cpp's format is not written for" in capsys.readouterr().err


@pytest.mark.parametrize("often", [None, 11])
def test_llama_cpp_continues_with_our_tokens(often):
    """Also 11, the end of a text of other kinds of tokenizers, which llama.cpp would never choose."""
    pytest.importorskip("xllamacpp")
    from shardformer.inference import Generator, Sampling

    c, params = make()
    if often is not None:
        params["transformer/embed"]["tokens"][often] *= 6
    prompts = np.random.default_rng(0).integers(0, c.model.vocab, (3, 8))
    theirs = llama_cpp_twin.load_llama_cpp(c, params, rows=3)(prompts, 12)
    generator = Generator(Model.on(c, mesh.make(c)))
    rows = generator.continue_prompts(params, prompts, Sampling(tokens=12, temperature=0))
    np.testing.assert_array_equal(theirs, [row.ids for row in rows])
    assert often is None or often in theirs
