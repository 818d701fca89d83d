"""The commands of the README on a small model: from chats and a Hugging Face folder to a tuned model."""

import json
import re
import shlex
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

from shardformer.__main__ import main
from shardformer.cli.train_command import FinalSample
from tests.convert.hf_models import FOLDER
from tests.data.chat import families
from tests.data.chat.chats import write_lines

ROOT = Path(__file__).parents[3]
README = ROOT / "shardformer" / "data" / "README.md"
SMALL = {
    "data prepare": ["validation=0.2"],
    "train": ["seq=96", "steps=12", "batch=8", "lr=0.02", "warmup=1", "mesh=1x1", "eval_every=12", "log_every=1"],
    "sample": ["tokens=8", "temperature=0"],
}


def commands() -> list[list[str]]:
    """Returns the commands of the README's section on conversations."""
    section = README.read_text().partition("## Train on conversations")[2].partition("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"^    python -m shardformer (.*)$", section, re.MULTILINE)]


def write_base(folder: Path) -> None:
    """Writes a model with a vocabulary of 61 letters and markers, and with Qwen's template."""
    shutil.copytree(FOLDER / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": 500.0, "rope_type": "default"}
    config |= {"max_position_embeddings": 96, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    letters = ["<unk>", *"\n abcdefghijklmnopqrstuvwxyzABCQ0123456789.,?"]
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(families.TEMPLATES / "qwen3.jinja", folder / "chat_template.jinja")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def record(n: int) -> dict:
    question, answer = {"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": "it is 7."}
    return {"messages": [question, answer]}


def walk(monkeypatch, folder: Path) -> list[int]:
    """Runs the commands in a folder; returns their exit statuses."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # a conversion runs in a separate process
    write_base(Path("HF_FOLDER"))
    write_lines(Path("chat.jsonl"), [record(n) for n in range(60)])
    monkeypatch.setattr(FinalSample, "write", lambda *_: "(no sample)")
    monkeypatch.setattr(FinalSample, "compile", lambda _: None)
    statuses = []
    for words in commands():
        added = next((small for command, small in SMALL.items() if " ".join(words).startswith(command)), [])
        statuses.append(main([*words, *added]))
    return statuses
