"""Models of rewards in Hugging Face's format, from the recorded language models, and what transformers gives with them.

`python -m tests.convert.reward_models` writes goldens/rewards.json. It needs transformers.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from shardformer.convert import safetensors_files, weight_files
from shardformer.convert.safetensors_files import CreatedTensor
from tests.convert.hf_models import FOLDER

GOLDENS = FOLDER.parent / "rewards.json"
CLASSES = {
    "llama": "LlamaForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",  # the table is the head of the language model
    "mistral": "MistralForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",  # the language model bounds its logits
    "gemma3": "Gemma3TextForSequenceClassification",
    "phi": "PhiForSequenceClassification",  # the head of the language model has a bias
    "gpt2": "GPT2ForSequenceClassification",
    "neox_parallel": "GPTNeoXForSequenceClassification",
    "biogpt": "BioGptForSequenceClassification",
}
LENGTHS = 24, 17  # of the rows
HEADS = ("lm_head.", "embed_out.", "output_projection.")
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def make_folder(name: str, target: Path, **changes) -> Path:
    """Writes the model of rewards with the layers of a recorded language model; `changes` are of config.json."""
    shutil.copytree(FOLDER / name, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": [CLASSES[name]]} | ONE_LABEL | changes
    (target / "config.json").write_text(json.dumps(config))
    tensors = weight_files.find_tensors(FOLDER / name)
    width = config.get("hidden_size") or config["n_embd"]
    head = (width**-0.5 * np.random.RandomState(3).standard_normal((1, width))).astype(jnp.bfloat16)
    made = [CreatedTensor(key, t.dtype, t.shape, t.read) for key, t in tensors.items() if not key.startswith(HEADS)]
    made.append(CreatedTensor("score.weight", head.dtype, head.shape, lambda: head))
    safetensors_files.write_tensors(target, made, 10**9)
    return target


def draw_tokens() -> np.ndarray:
    """Returns two rows without the ids of padding, the second of which ends before its last column."""
    return np.random.RandomState(7).randint(3, 61, (2, max(LENGTHS))).astype(np.int32)


def main() -> None:
    import tempfile

    import torch
    import transformers

    scores = {}
    for name in CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            load = transformers.AutoModelForSequenceClassification.from_pretrained
            model = load(make_folder(name, Path(folder, "model")), attn_implementation="eager", dtype=torch.float32)
        assert type(model).__name__ == CLASSES[name]
        rows = [torch.from_numpy(row[:n]).long() for row, n in zip(draw_tokens(), LENGTHS, strict=True)]
        with torch.no_grad():
            scores[name] = [float(model.eval()(row[None]).logits[0, 0]) for row in rows]
        print(name, scores[name])
    GOLDENS.write_text(json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
