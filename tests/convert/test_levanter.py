"""levanter's checkpoints of Llamas hold the weights of the Hugging Face folder that they were made from.

levanter serialises its tree by JAX's GlobalAsyncCheckpointManager, which writes the arrays here too.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from shardformer.convert import levanter
from tests.convert.test_maxtext import FOLDER, convert, expected, read_run, read_safetensors
from tests.runs import FAILED, USAGE

GROUPS, PER_GROUP, SIZE = 8, 2, 4
AXES = {
    "q_proj": (GROUPS, PER_GROUP, SIZE, -1), "k_proj": (GROUPS, SIZE, -1), "v_proj": (GROUPS, SIZE, -1),
    "o_proj": (-1, GROUPS * PER_GROUP, SIZE),
}  # fmt: skip
NAMES = {
    "model.embed_tokens.weight": "embeddings.token_embeddings.weight",
    "model.norm.weight": "transformer.norm.weight",
}


def list_arrays(is_stacked: bool) -> dict[str, np.ndarray]:
    """Returns the recorded Llama with the names and axes that levanter's llama.py gives its arrays."""
    result, layers = {}, {}
    for name, values in read_safetensors(FOLDER / "llama" / "model.safetensors").items():
        place, _, rest = name.removeprefix("model.layers.").partition(".")
        if not name.startswith("model.layers."):
            result[NAMES.get(name, name)] = values
            continue
        module = rest.split(".")[-2]
        layers.setdefault(rest, {})[int(place)] = values.reshape(AXES[module]) if module in AXES else values
    for rest, values in layers.items():
        if is_stacked:
            result[f"transformer.layers.stacked.{rest}"] = np.stack([values[0], values[1]])
        else:
            result |= {f"transformer.layers.blocks.{i}.{rest}": array for i, array in values.items()}
    return result


def save(folder, arrays: dict[str, np.ndarray]):
    folder.mkdir(parents=True)
    paths = [str(folder.joinpath("model", *name.split("."))) for name in arrays]
    manager = GlobalAsyncCheckpointManager()
    manager.serialize_with_paths([jnp.asarray(array) for array in arrays.values()], paths)
    manager.wait_until_finished()
    (folder / "metadata.json").write_text(json.dumps({"step": 7, "timestamp": "2026-01-01T00:00:00"}))
    return folder


def save_as_older_jax(folder, arrays: dict[str, np.ndarray]):
    """Writes each array into a folder, in zarr 2."""
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        store = {"driver": "file", "path": str(folder.joinpath("model", *name.split(".")))}
        spec = {"driver": "zarr", "kvstore": store}
        tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()
    (folder / "metadata.json").write_text(json.dumps({"step": 7}))
    return folder


@pytest.mark.parametrize("write", [save, save_as_older_jax])
@pytest.mark.parametrize("is_stacked", [True, False])
def test_a_checkpoint_becomes_a_run(write, is_stacked, tmp_path, capsys):
    write(tmp_path / "run1" / "step-7", list_arrays(is_stacked))
    assert convert(tmp_path / "run1", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == 0
    assert "of a llama model, ids as its tokenizer" in capsys.readouterr().out
    assert read_run(tmp_path / "run") == expected("llama")


def test_another_order_of_axes_is_rejected(tmp_path, capsys):
    """The negative twin: older versions of levanter stored the inputs first."""
    arrays = list_arrays(True)
    name = "transformer.layers.stacked.self_attn.q_proj.weight"
    save_as_older_jax(tmp_path / "ckpt", arrays | {name: np.moveaxis(arrays[name], -1, 1)})
    assert convert(tmp_path / "ckpt", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == USAGE
    assert "self_attn.q_proj.weight is [" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_newest_step_is_read(tmp_path):
    for step in (9, 10):
        (tmp_path / f"step-{step}" / "model").mkdir(parents=True)
        (tmp_path / f"step-{step}" / "metadata.json").write_text("{}")
    assert levanter.find_checkpoint(tmp_path) == tmp_path / "step-10" / "model"
    assert levanter.find_checkpoint(tmp_path / "step-9") == tmp_path / "step-9" / "model"


def test_mistakes_are_named(tmp_path, capsys):
    def fail(source, *words, status=USAGE) -> str:
        assert convert(tmp_path / source, tmp_path / "run", "tokenizer=ids", *words) == status
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    arrays, config = list_arrays(True), f"config={FOLDER / 'llama'}"
    save_as_older_jax(tmp_path / "whole", arrays)
    less = {name: array for name, array in arrays.items() if "up_proj" not in name}
    save_as_older_jax(tmp_path / "less", less)
    deeper = {name: np.concatenate([a, a]) if "stacked" in name else a for name, a in arrays.items()}
    save_as_older_jax(tmp_path / "deeper", deeper)
    assert "a checkpoint of levanter's, which has no configuration; give config=FOLDER" in fail("whole")
    assert "of levanter's models llama is read, got gpt2" in fail("whole", f"config={FOLDER / 'gpt2'}")
    assert "and axis 0 has the 2 layers of config.json" in fail("deeper", config)
    assert "lacks model.layers.0.mlp.up_proj.weight" in fail("less", config, status=FAILED)
    (tmp_path / "whole" / "model" / "manifest.ocdbt").write_bytes(b"damaged")
    assert "cannot be read" in fail("whole", config, status=FAILED)
