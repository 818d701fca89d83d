"""The pairs, the model and the gradients that TRL's results were recorded with; see record_preferences.py."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np

from shardformer.config import Config
from shardformer.convert import hf_settings, hf_state, runs
from shardformer.data.chat.preference_windows import PreferenceSplit
from shardformer.data.corpus import choose_row_layout
from shardformer.data.tokens import Tokens
from shardformer.layout import mesh
from shardformer.training.trainer import Trainer
from tests.objectives.record_preferences import CASES, FOLDER, PAIRS, REFERENCE

RECORDED = json.loads((FOLDER / "pairs.json").read_text())
SEQ = 16


def make_config(case: str, **changes) -> Config:
    """Returns the configuration of a recorded case."""
    _, config = hf_settings.read_config(FOLDER)
    keys = {"mesh": "1x1", "batch": 8, "seq": SEQ, "documents": "padded", "clip": 0.0} | CASES[case][0] | changes
    return config.replace(**keys)


@functools.cache
def read_arrays(file: str) -> dict[str, np.ndarray]:
    """Returns arrays in Hugging Face's names, a model or its gradient, under our names."""
    family, config = hf_settings.read_config(FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(FOLDER / "config.json", folder)
        shutil.copy(FOLDER / file, Path(folder) / "model.safetensors")
        leaves = hf_state.open_params(Path(folder), family, config, set())
        return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def read_params(trainer: Trainer, factor: float = 1.0) -> dict:
    """Returns the recorded model on the trainer's devices; `factor` multiplies its matrices, for the reference."""
    arrays = {
        name: leaf if "norm" in name else leaf * np.float32(factor)
        for name, leaf in read_arrays("model.safetensors").items()
    }
    return jax.device_put(runs.nest(trainer.model.shapes, arrays), trainer.model.shardings)


def make_split(**options) -> PreferenceSplit:
    """Returns the recorded pairs; `scores` changes the mask of a side."""
    ids, scored, ends = [], [], []
    for pair in RECORDED["pairs"]:
        for side in ("chosen", "rejected"):
            ids += pair["prompt"] + pair[side]
            scored += [0] * len(pair["prompt"]) + [1] * len(pair[side])
            ends.append(len(ids))
    tokens = Tokens([np.array(ids, np.uint16)], "TEST"), np.array(ends)
    return PreferenceSplit(*tokens, Tokens([np.array(scored, np.uint8)], "TEST"), **options)


@functools.cache
def make_trainer(config: Config) -> Trainer:
    return Trainer(config, mesh.make(config))


@functools.cache
def find_references(case: str = "dpo") -> np.ndarray:
    """Returns the log-probabilities [pairs, 2 or 4] of the recorded reference, which our model computes."""
    trainer = make_trainer(make_config(case, batch=PAIRS))
    batch = make_split().make_windows(choose_row_layout(trainer.config)).gather(np.arange(PAIRS))
    params = read_params(trainer, REFERENCE)
    return np.asarray(jax.jit(trainer.model.log_probabilities)(params, trainer.to_devices(batch)))[:, :, 0]


def make_batch(config: Config, references: np.ndarray | None = None) -> dict:
    """Returns the batch with each recorded pair once; rows beyond have none."""
    if config.objective.needs_references and references is None:
        references = find_references("kto" if config.objective.measures_kl else "dpo")
    windows = make_split(references=references).make_windows(choose_row_layout(config))
    return windows.gather(np.arange(config.training.batch))


def loss_and_grads(case: str, batch: dict | None = None, **changes):
    """Returns our `PairLoss` and gradients of a recorded case, on the host."""
    trainer = make_trainer(make_config(case, **changes))
    batch = make_batch(trainer.config) if batch is None else batch
    run = compiled(trainer)
    return jax.tree.map(np.asarray, run(read_params(trainer), trainer.to_devices(batch), trainer.dropout_key(0)))


@functools.cache
def compiled(trainer: Trainer):
    return jax.jit(trainer.model.loss_and_grad)


def recorded_gradients(case: str, like: dict) -> dict:
    return runs.nest(like, read_arrays(f"{case}.gradients"))
