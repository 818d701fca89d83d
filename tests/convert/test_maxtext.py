"""MaxText's checkpoints, which Orbax writes here, hold the weights of the Hugging Face folder they were made from."""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest

from shardformer.__main__ import main
from shardformer.convert import maxtext, orbax_folder, runs
from shardformer.training.run_folder import Run
from tests.convert.hf_models import FOLDER
from tests.convert.test_hf import params_of
from tests.runs import FAILED, USAGE

HEADS = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
MODULES = {
    "input_layernorm": "pre_self_attention_layer_norm", "post_attention_layernorm": "post_self_attention_layer_norm",
    "self_attn.q_proj": "self_attention.query", "self_attn.k_proj": "self_attention.key",
    "self_attn.v_proj": "self_attention.value", "self_attn.o_proj": "self_attention.out",
    "self_attn.q_norm": "self_attention.query_norm", "self_attn.k_norm": "self_attention.key_norm",
    "mlp.gate_proj": "mlp.wi_0", "mlp.up_proj": "mlp.wi_1", "mlp.down_proj": "mlp.wo",
    "block_sparse_moe.gate": "MoeBlock_0.gate", "mlp.gate": "moe_block.gate",
}  # fmt: skip
EXPERTS = {
    "gate_proj": "moe_block.wi_0", "up_proj": "moe_block.wi_1", "down_proj": "moe_block.wo",
    "w1": "MoeBlock_0.wi_0", "w3": "MoeBlock_0.wi_1", "w2": "MoeBlock_0.wo",
}  # fmt: skip


def read_safetensors(path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, each in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = each["data_offsets"]
            values = np.frombuffer(content[start + first : start + last], ml_dtypes.bfloat16)
            arrays[name] = values.reshape(each["shape"]).astype(np.float32)
    return arrays


def to_maxtext(family: str, module: str, kind: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns MaxText's name within a layer, and its array, as its param_mapping.py has them."""
    name = module.rpartition(".")[2]
    if kind == "bias":
        return f"{MODULES[module]}.bias", values.reshape(HEADS[name], -1)
    if values.ndim == 1:
        return f"{MODULES[module]}.scale", values
    values = values.T
    if name in HEADS:
        values = values.reshape(len(values), HEADS[name], -1)
        half = values.shape[-1] // 2
        if family == "llama" and name != "v_proj":  # Llama 3.1 alone has rotary pairs side by side
            values = np.stack([values[..., :half], values[..., half:]], axis=-1).reshape(values.shape)
        if family in ("llama", "mistral", "mixtral") and name == "q_proj":
            values = values / np.sqrt(np.float32(values.shape[-1]))
    if name == "o_proj":
        values = values.reshape(HEADS["q_proj"], -1, values.shape[-1])
    return f"{MODULES[module]}.kernel", values


def list_arrays(family: str, scanned: bool) -> dict[str, np.ndarray]:
    arrays = read_safetensors(FOLDER / family / "model.safetensors")
    result = {
        "token_embedder.embedding": arrays.pop("model.embed_tokens.weight"),
        "decoder.decoder_norm.scale": arrays.pop("model.norm.weight"),
    }
    if "lm_head.weight" in arrays:
        result["decoder.logits_dense.kernel"] = arrays.pop("lm_head.weight").T
    layers: list[dict] = [{}, {}]
    for name, values in arrays.items():
        _, _, layer, *module, kind = name.split(".")
        if "experts" in module:
            expert, matrix = module[-2:]
            layers[int(layer)].setdefault(EXPERTS[matrix], {})[int(expert)] = values.T
        else:
            ours, array = to_maxtext(family, ".".join(module), kind, values)
            layers[int(layer)][ours] = array
    for layer in layers:
        for name, each in layer.items():
            layer[name] = np.stack([each[i] for i in range(len(each))]) if isinstance(each, dict) else each
    if not scanned:
        return result | {f"decoder.layers_{i}.{name}": a for i in (0, 1) for name, a in layers[i].items()}
    return result | {f"decoder.layers.{name}": np.stack([a, layers[1][name]], 1) for name, a in layers[0].items()}


def save(path, arrays: dict[str, np.ndarray], dtype=np.float32, **how):
    tree: dict = {}
    for name, array in arrays.items():
        *modules, last = name.split(".")
        inside = tree
        for module in modules:
            inside = inside.setdefault(module, {})
        inside[last] = jnp.asarray(array, dtype)
    state = {"params": {"params": tree}, "opt_state": {"mu": {"params": jnp.ones(3)}}, "step": 7}
    orbax.checkpoint.PyTreeCheckpointer(**how).save(path.absolute(), state)


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def read_run(folder) -> dict[str, bytes]:
    with runs.open_state(Run.open(folder), 0, False) as state:
        return {name: np.asarray(leaf).tobytes() for name, leaf in state.params.items()}


def expected(family: str) -> dict[str, bytes]:
    return {name: leaf.tobytes() for name, leaf in params_of(FOLDER / family).items()}


@pytest.mark.parametrize("family", maxtext.NAMES)
@pytest.mark.parametrize("scanned", [True, False])
def test_a_checkpoint_becomes_a_run(family, scanned, tmp_path, capsys):
    save(tmp_path / "3" / "items", list_arrays(family, scanned))
    assert convert(tmp_path, tmp_path / "run", f"config={FOLDER / family}", "tokenizer=ids") == 0
    assert f"of a {family} model, ids as its tokenizer" in capsys.readouterr().out
    assert read_run(tmp_path / "run") == expected(family)


@pytest.mark.parametrize("how", [{"use_ocdbt": False}, {"use_zarr3": True}, {"dtype": jnp.bfloat16}])
def test_each_form_of_orbax_is_read(how, tmp_path):
    save(tmp_path / "ckpt", list_arrays("llama", True), **how)
    assert convert(tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == 0
    assert read_run(tmp_path / "run") == expected("llama")


@pytest.mark.parametrize("broken_part", ["_is_scaled", "_has_pairs"])
def test_queries_as_they_are_stored_are_others(broken_part, tmp_path, broken):
    """The negative twin."""
    save(tmp_path / "ckpt", list_arrays("llama", True))
    broken(maxtext, broken_part, lambda *_: False)
    assert convert(tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == 0
    different = {name for name, values in read_run(tmp_path / "run").items() if values != expected("llama")[name]}
    assert {name.rpartition("/")[2] for name in different} == ({"q"} if broken_part == "_is_scaled" else {"q", "k"})


def test_newest_step_is_read(tmp_path):
    arrays = list_arrays("qwen3", True)
    save(tmp_path / "10" / "items", arrays)
    save(tmp_path / "9" / "items", arrays | {"decoder.decoder_norm.scale": np.zeros(32)})
    assert orbax_folder.find_state(tmp_path) == tmp_path / "10" / "items"
    assert orbax_folder.find_state(tmp_path / "9") == tmp_path / "9" / "items"


def test_mistakes_are_named(tmp_path, capsys):
    def fail(source, *words, status=USAGE) -> str:
        assert convert(tmp_path / source, tmp_path / "run", "tokenizer=ids", *words) == status
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    arrays = list_arrays("llama", True)
    save(tmp_path / "whole", arrays)
    save(tmp_path / "more", arrays | {"decoder.layers.mlp.wi_2.kernel": np.ones((32, 2, 64))})
    save(tmp_path / "deeper", {name: np.concatenate([a, a], 1) if a.ndim > 2 else a for name, a in arrays.items()})
    save(tmp_path / "less", {name: array for name, array in arrays.items() if "wi_1" not in name})
    assert "give config=FOLDER, a Hugging Face folder with config.json" in fail("whole")
    assert "give config=FOLDER" in fail("whole", f"config={tmp_path}")
    assert "of MaxText's models llama, mistral," in fail("whole", f"config={FOLDER / 'gpt2'}")
    assert "contradicts" in fail("whole", f"config={FOLDER / 'llama'}", "layers=3")
    assert "decoder.layers.mlp.wi_2.kernel" in fail("more", f"config={FOLDER / 'llama'}")
    assert "and axis 1 has the 2 layers of config.json; give another" in fail("deeper", f"config={FOLDER / 'llama'}")
    mixtral = list_arrays("mixtral", True)
    save(tmp_path / "wider", {name: np.concatenate([a, a]) if "wi_0" in name else a for name, a in mixtral.items()})
    assert "and axis 0 has the 4 experts of config.json; give another" in fail("wider", f"config={FOLDER / 'mixtral'}")
    assert "lacks model.layers.0.mlp.up_proj.weight" in fail("less", f"config={FOLDER / 'llama'}", status=FAILED)


def test_damaged_checkpoints_are_named(tmp_path, capsys):
    save(tmp_path / "ckpt", list_arrays("llama", True), use_ocdbt=False)
    shutil.rmtree(tmp_path / "ckpt" / "params.params.decoder.decoder_norm.scale")
    words = tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids"
    assert convert(*words) == FAILED
    assert "params.params.decoder.decoder_norm.scale cannot be read: NOT_FOUND" in capsys.readouterr().err
    described = json.loads((tmp_path / "ckpt" / "_METADATA").read_text())
    leaf = described["tree_metadata"].popitem()[1]
    leaf["key_metadata"][-1]["key"] = "\ud800"
    for text in ("[]", "[" * 100_000, json.dumps(described | {"tree_metadata": {"": leaf}})):
        (tmp_path / "ckpt" / "_METADATA").write_text(text)
        assert convert(*words) == FAILED
        assert "_METADATA does not list arrays" in capsys.readouterr().err


def test_lost_chunk_is_no_zero(tmp_path, capsys):
    save(tmp_path / "ckpt", list_arrays("llama", True), use_ocdbt=False)
    (tmp_path / "ckpt" / "params.params.decoder.layers.mlp.wo.kernel" / "0.0.0").unlink()
    assert convert(tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == FAILED
    assert "mlp.wo.kernel cannot be read: NOT_FOUND" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_older_checkpoints_leave_out_zeros(tmp_path):
    save(tmp_path / "ckpt", list_arrays("llama", True), use_ocdbt=False)
    (tmp_path / "ckpt" / "params.params.decoder.decoder_norm.scale" / "0").unlink()
    described = tmp_path / "ckpt" / "_METADATA"
    settings = json.loads(described.read_text()) | {"store_array_data_equal_to_fill_value": False}
    described.write_text(json.dumps(settings))
    assert convert(tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == 0
    different = {name for name, values in read_run(tmp_path / "run").items() if values != expected("llama")[name]}
    assert different == {"transformer/head/norm/scale"}
    assert not any(read_run(tmp_path / "run")["transformer/head/norm/scale"])


def test_chunk_larger_than_its_array_is_not_allocated(tmp_path, capsys):
    save(tmp_path / "ckpt", list_arrays("llama", True), use_ocdbt=False)
    described = tmp_path / "ckpt" / "params.params.decoder.decoder_norm.scale" / ".zarray"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"chunks": [2**50]}))
    assert convert(tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == FAILED
    assert "is [64] in chunks of [1125899906842624]: damaged" in capsys.readouterr().err


def test_missing_tensorstore_is_named(tmp_path, capsys, monkeypatch):
    save(tmp_path / "ckpt", list_arrays("llama", True))
    monkeypatch.setattr(orbax_folder.importlib.util, "find_spec", lambda name: None)
    assert convert(tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == USAGE
    assert "pip install 'shardformer[orbax]'" in capsys.readouterr().err
