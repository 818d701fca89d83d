"""Records files of flax.serialization, and names of transformers' Flax classes: python -m tests.convert.record_flax.

Needs flax, torch and a transformers that has Flax classes: goldens/flax is of flax 0.12.8 and transformers 4.53.3.
"""

import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from shardformer.convert import weight_files
from tests.convert import hf_models

FOLDER = Path(__file__).parent / "goldens" / "flax"
# Those that had Flax classes. Mistral's, whose names are Llama's, does not compute the recorded model's size of heads.
FAMILIES = ("gpt2", "gptj", "gpt_neo", "opt", "bloom", "llama", "gemma")
CHUNK = 64  # bytes: flax divides larger arrays, as it does with those of more than 2**30 bytes


def make_tree() -> dict:
    """Arrays of each number type and form, under names that PyTorch has too."""
    draw = np.random.default_rng(0).normal
    layer = {"ln_1": {"scale": draw(size=4).astype(np.float32)}, "empty": {}}
    layer["mlp"] = {"kernel": draw(size=(6, 4)).astype(np.float32), "bias": draw(size=5).astype(jnp.bfloat16)}
    table = {"embedding": draw(size=(7, 3)).astype(np.float16)}
    return {"wte": table, "h": {"0": layer}, "none": np.zeros((0, 3), np.float32), "count": np.int64(7)}


def find_names(name: str) -> dict[str, tuple[str, bool]]:
    """Returns Flax's names of a recorded model: PyTorch's name of the same values, and whether they are transposed.

    transformers itself converts the model.
    """
    from flax.traverse_util import flatten_dict
    from transformers import AutoModelForCausalLM, FlaxAutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_pretrained(hf_models.FOLDER / name).save_pretrained(folder, safe_serialization=False)
        params = FlaxAutoModelForCausalLM.from_pretrained(folder, from_pt=True).params
    theirs = {key: np.float32(t.read()) for key, t in weight_files.find_tensors(hf_models.FOLDER / name).items()}
    result = {}
    for flax, array in flatten_dict(params, sep="/").items():
        (found,) = [
            (torch, transposed)
            for torch, values in theirs.items()
            for transposed in ((False, True) if values.ndim == 2 else (False,))
            if np.array_equal(np.asarray(array), values.T if transposed else values)
        ]
        result[flax] = found
    return result


def main() -> None:
    import msgpack
    from flax import serialization

    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "plain.msgpack").write_bytes(serialization.to_bytes(make_tree()))
    serialization.MAX_CHUNK_SIZE = CHUNK
    (FOLDER / "chunked.msgpack").write_bytes(serialization.to_bytes(make_tree()))
    packer = msgpack.Packer()  # EasyLM's StreamingCheckpointer
    layer = make_tree()["h"]["0"]["mlp"]
    state = {("step",): 3, ("opt_state", "mu", "mlp", "bias"): layer["bias"]}
    state |= {("params", "params", "mlp", name): array for name, array in layer.items()}
    pairs = [packer.pack((key, serialization.to_bytes(value))) for key, value in state.items()]
    (FOLDER / "stream").write_bytes(b"".join(pairs))
    names = {name: find_names(name) for name in FAMILIES}
    (FOLDER / "names.json").write_text(json.dumps(names) + "\n")


if __name__ == "__main__":
    main()
