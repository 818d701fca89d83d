"""EasyLM's streams of Llama: every array is read, and what they do not show is asked for."""

import json
import struct

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.config.names import LAYERS
from shardformer.convert import easylm, flax_files, hf_settings, runs
from shardformer.errors import UsageError
from shardformer.training.run_folder import Run
from tests.convert.hf_models import FOLDER
from tests.convert.test_flax_files import chunked, described, pack
from tests.convert.test_hf import params_of
from tests.runs import FAILED, USAGE

SOURCE = FOLDER / "llama"
KEYS = ("heads=16", "norm_eps=1e-6", "seq=24", "tokenizer=ids")
# EasyLM's names, and ours: both have [inputs, outputs] and rotary pairs of neighbours.
IN_LAYER = {
    "attention/wq": "q", "attention/wk": "k", "attention/wv": "v", "attention/wo": "o", "feed_forward/w1": "gate",
    "feed_forward/w2": "down", "feed_forward/w3": "up", "attention_norm": "attention_norm/scale",
    "ffn_norm": "feed_forward_norm/scale",
}  # fmt: skip


def pack_pair(name: str, array: np.ndarray) -> bytes:
    """Writes a pair with the heads that EasyLM's packer chooses: [[str, ...], bytes]."""
    parts, content = [part.encode() for part in name.split("/")], pack(array)
    key = bytes([0x90 + len(parts)]) + b"".join(bytes([0xA0 + len(part)]) + part for part in parts)
    return b"\x92" + key + struct.pack(">BI", 0xC6, len(content)) + content


def list_arrays(scanned: bool) -> dict[str, np.ndarray]:
    ours = {name.removeprefix("transformer/"): array for name, array in params_of(SOURCE).items()}
    result = {
        "transformer/wte/embedding": ours["embed/tokens"][:61],
        "transformer/ln_f/kernel": ours["head/norm/scale"],
        "lm_head/kernel": ours["head/w"][:, :61],
    }
    for theirs, name in IN_LAYER.items():
        array = ours[f"{LAYERS.removeprefix('transformer/')}/{name}"]
        layers = {"scan_decoder": array} if scanned else dict(enumerate(array))
        result |= {f"transformer/h/{layer}/{theirs}/kernel": values for layer, values in layers.items()}
    return result


def write_stream(path, scanned=False, prefix="", **changes):
    arrays = list_arrays(scanned) | changes
    content = [pack_pair(prefix + name, array) for name, array in arrays.items() if array is not None]
    path.write_bytes(b"".join(content))
    return path


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def read_run(folder) -> dict[str, bytes]:
    with runs.open_state(Run.open(folder), 0, False) as state:
        return {name: np.asarray(leaf).tobytes() for name, leaf in state.params.items()}


EXPECTED = {name: leaf.tobytes() for name, leaf in params_of(SOURCE).items()}


@pytest.mark.parametrize("how", [{}, {"scanned": True}, {"prefix": "params/params/"}])
def test_a_stream_becomes_a_run(how, tmp_path, capsys):
    assert convert(write_stream(tmp_path / "params", **how), tmp_path / "run", *KEYS) == 0
    assert "of EasyLM's llama, ids as its tokenizer" in capsys.readouterr().out
    assert read_run(tmp_path / "run") == EXPECTED
    _, theirs = hf_settings.read_config(SOURCE)
    expected = theirs.replace(tokenizer="ids", data="", rotary_scaling="", rotary_theta=10_000.0)
    assert Run.open(tmp_path / "run").config.replace(out="") == expected


def test_config_json_next_to_a_stream_is_read(tmp_path):
    (tmp_path / "config.json").write_bytes((SOURCE / "config.json").read_bytes())
    stream = write_stream(tmp_path / "params")
    assert convert(stream, tmp_path / "run", "tokenizer=ids") == 0
    assert Run.open(tmp_path / "run").config.model == hf_settings.read_config(SOURCE)[1].model
    assert convert(stream, tmp_path / "again", "tokenizer=ids", "heads=8") == USAGE


def test_config_json_of_another_family_is_rejected(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((FOLDER / "gpt2" / "config.json").read_bytes())
    assert convert(write_stream(tmp_path / "params"), tmp_path / "run") == USAGE
    assert "is a Llama of EasyLM's, and" in capsys.readouterr().err


def test_base_models_are_those_of_easylm():
    """The heads of each size are as wide as in the published models."""
    assert easylm.BASE_MODELS["llama_3b"] == {"seq": 2048, "norm_eps": 1e-6, "heads": 32}
    assert easylm.BASE_MODELS["llama_65b"] == {"seq": 2048, "norm_eps": 1e-5, "heads": 64}
    assert easylm.BASE_MODELS["llama2_13b"] == {"seq": 4096, "norm_eps": 1e-5, "heads": 40}
    assert easylm.BASE_MODELS["llama3_8b"] == {"seq": 8192, "norm_eps": 1e-5, "rotary_theta": 5e5, "heads": 32}


def test_base_model_names_what_the_arrays_lack(tmp_path):
    stream = write_stream(tmp_path / "params")
    assert convert(stream, tmp_path / "run", "base_model=llama_1b", "seq=24", "rotary_theta=1e6", "tokenizer=ids") == 0
    model = Run.open(tmp_path / "run").config.model
    assert (model.heads, model.seq, model.norm_eps, model.rotary_theta) == (16, 24, 1e-6, 1e6)
    assert read_run(tmp_path / "run") == EXPECTED


REJECTED = {
    "no_heads": ((), {}, "does not show the number of heads; give base_model=NAME"),
    "no_size": (("base_model=7b",), {}, "base_model is one of llama_1b"),
    "wrong_size": (("base_model=llama_13b",), {}, "heads=40 does not divide the width 64"),
    "contradiction": ((*KEYS, "d_ff=7"), {}, "d_ff=7 contradicts"),
    "vision": (KEYS, {"transformer/vte/embedding": np.zeros((3, 64), np.float32)}, "has transformer.vte.weight"),
    "no_table": (KEYS, {"transformer/wte/embedding": None}, "lacks the matrix transformer.wte.weight"),
    "out": ((*KEYS, "out=x"), {}, "the run's folder is DST"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_wrong_streams_and_keys_are_rejected(name, tmp_path, capsys):
    keys, changes, message = REJECTED[name]
    assert convert(write_stream(tmp_path / "params", **changes), tmp_path / "run", *keys) == USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


SCANNED = b"transformer.h.scan_decoder.attention.wq.kernel"
TOO_MANY_LAYERS = {
    "in_one_piece": described([2**40, 0], content=b"")[3:],
    "in_pieces": pack(chunked([2**40, 0], np.zeros(0, np.float32))["a"]),
    "of_single_values": pack(np.zeros((100_001, 1), np.bool_)),
    "of_many_pieces": pack(chunked([400, 1], *[np.zeros(1, np.float32)] * 400)["a"]),
}


@pytest.mark.parametrize("name", TOO_MANY_LAYERS)
def test_layers_beyond_the_limit_are_rejected(name, tmp_path):
    """Without values, a file of about 90 bytes would fill the memory with the names of its layers."""
    content = TOO_MANY_LAYERS[name]
    key = b"\x91\xd9" + bytes([len(SCANNED)]) + SCANNED
    (tmp_path / "params").write_bytes(b"\x92" + key + struct.pack(">BI", 0xC6, len(content)) + content)
    tensors = flax_files.read_stream(tmp_path / "params")
    with pytest.raises(UsageError, match=r"layers in 'transformer.h.scan_decoder.*the limit of 100,000"):
        easylm._unstack(tensors)


def test_a_lost_array_and_a_cut_stream_are_damaged(tmp_path, capsys):
    stream = write_stream(tmp_path / "params", **{"transformer/h/1/ffn_norm/kernel": None})
    assert convert(stream, tmp_path / "run", *KEYS) == FAILED
    assert "lacks transformer.h.1.ffn_norm.weight" in capsys.readouterr().err
    stream.write_bytes(stream.read_bytes()[:-1])
    assert convert(stream, tmp_path / "run", *KEYS) == FAILED
    assert "is damaged" in capsys.readouterr().err


def test_a_text_is_no_stream(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([["a"], 1]))
    assert convert(tmp_path / "a.json", tmp_path / "run") == USAGE
