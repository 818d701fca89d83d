"""levanter's checkpoints of Llamas hold the weights of the Hugging Face folder that they were made from.

levanter serialises its tree by JAX's GlobalAsyncCheckpointManager, which writes the arrays here too.
"""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from shardformer.convert import levanter
from shardformer.errors import RunError
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


def save_as_older_jax(folder, arrays: dict[str, np.ndarray], driver: str = "zarr"):
    """Writes each array into a folder, in the format of a driver of tensorstore."""
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        store = {"driver": "file", "path": str(folder.joinpath("model", *name.split(".")))}
        spec = {"driver": driver, "kvstore": store}
        tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()
    (folder / "metadata.json").write_text(json.dumps({"step": 7}))
    return folder


def save_in_zarr3(folder, arrays: dict[str, np.ndarray]):
    """Writes each array into a folder, in zarr 3, and describes the folder of all."""
    save_as_older_jax(folder, arrays, "zarr3")
    (folder / "model" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    return folder


@pytest.mark.parametrize(("write", "is_stacked"), [
    (save, True), (save, False), (save_as_older_jax, True), (save_as_older_jax, False), (save_in_zarr3, True),
])  # fmt: skip
def test_a_checkpoint_becomes_a_run(write, is_stacked, tmp_path, capsys):
    write(tmp_path / "run1" / "step-7", list_arrays(is_stacked))
    assert convert(tmp_path / "run1", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == 0
    shown = capsys.readouterr()
    assert "of a llama model, ids as its tokenizer" in shown.out
    assert "zero" not in shown.out
    assert f"{tmp_path / 'run1' / 'step-7'} is read\n" in shown.out + shown.err
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


def test_skipped_step_and_lost_array_are_named(tmp_path, capsys):
    arrays = list_arrays(False)
    save_as_older_jax(tmp_path / "src" / "step-7", arrays)
    (tmp_path / "src" / "step-8" / "model").mkdir(parents=True)
    lost = tmp_path / "src" / "step-7" / "model" / "transformer" / "layers" / "blocks" / "1" / "mlp" / "up_proj"
    for chunk in (lost / "weight").glob("[0-9]*"):
        chunk.unlink()
    assert convert(tmp_path / "src", tmp_path / "run", f"config={FOLDER / 'llama'}", "tokenizer=ids") == 0
    shown = capsys.readouterr()
    assert "step-7 is read, as step-8, which is newer, lacks metadata.json or model" in shown.out + shown.err
    assert "1 arrays are all zero, or were lost, transformer.layers.blocks.1.mlp.up_proj.weight first" in shown.out


def test_damaged_folders_of_arrays_are_rejected(tmp_path):
    scalar = save_as_older_jax(tmp_path / "scalar", {"step": np.ones((), np.float32)}) / "model"
    assert levanter.FoldersOfArrays(scalar).read("step", (...,)) == 1
    for name, folders, problem in (
        ("twice", ("a.b", "a/b"), "two arrays with the name a.b"),
        ("unnamed", ("",), "is itself an array"),
        ("latin1", ("a\udce9",), "is not UTF-8"),
    ):
        for folder in folders:
            shutil.copytree(scalar / "step", tmp_path / name / folder)
        with pytest.raises(RunError, match=problem):
            levanter.FoldersOfArrays(tmp_path / name)


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
