"""The runs of a server: their folders, their weights on the devices, and newer checkpoints of a run in training."""

import dataclasses
import sys
import time
from pathlib import Path

import jax
import numpy as np

from shardformer import checkpoint, storage
from shardformer.cli.arguments import run_folder, say
from shardformer.cli.base_model import convert_in_process
from shardformer.config import key_names
from shardformer.config.model_keys import ModelKeys
from shardformer.convert import hf_settings, peft
from shardformer.errors import RunError, UsageError
from shardformer.experts.expert_keys import ExpertKeys
from shardformer.inference.serve.engine_thread import EngineThread
from shardformer.inference.serve.jobs import Weights
from shardformer.inference.serve.service import Served
from shardformer.model import Model
from shardformer.training.run_folder import Run

RELOAD_SECONDS = 10.0  # between two looks for a newer checkpoint


def open_served(word: str, scratch: Path, name: str = "", base: Run | None = None) -> Run:
    """Opens a run, or the run that a folder of Hugging Face, or of PEFT's adapters of `base`, is converted to.

    A converted run is in `scratch` and has the folder's name, unless another is given.
    """
    folder = run_folder(word)
    is_adapter = isinstance(folder, Path) and peft.is_peft_folder(folder)
    if not is_adapter and not hf_settings.is_hf_folder(folder):
        return Run.open(folder)
    if is_adapter and base is None:
        raise UsageError(f"{word} has adapters without weights; serve their base, with models=NAME={word}")
    source, target = storage.local_path(word), scratch / (name or folder.name)
    say(convert_in_process(str(source), target, *([f"base={base.out}"] if is_adapter and base else [])))
    return Run.open(target)


def check_other(word: str, other: Run, run: Run) -> None:
    """Raises UsageError unless both runs fit into one engine; adapters and the form of the weights may differ."""
    names = (*key_names(ModelKeys, ExpertKeys), "dtype")
    if differing := [name for name in names if run.config.get(name) != other.config.get(name)]:
        mine, others = (", ".join(f"{name}={one.config.shown(name)}" for name in differing) for one in (run, other))
        raise UsageError(f"models={word} has {others}, and {run.out} has {mine}; serve it by itself")
    if other.vocabulary != run.vocabulary:
        raise UsageError(f"models={word} has another vocabulary than {run.out}; serve it by itself")


@dataclasses.dataclass(eq=False)
class ServedRun:
    """A run, the step of its checkpoint that new requests get, and its entry of the service."""

    run: Run
    thread: EngineThread
    model: Model
    served: Served
    step: int
    averaged: bool

    @staticmethod
    def load(run: Run, name: str, thread: EngineThread, model: Model, params, step: int, averaged: bool) -> "ServedRun":
        """Loads the run whose model the engine was made for."""
        weights = thread.engine.load(params, f"step {step}", donate=True)
        return ServedRun(run, thread, model, Served(name, weights), step, averaged)

    def add(self, name: str, other: Run, model: Model) -> "ServedRun":
        """Loads the best checkpoint of another run; arrays that are equal to this run's are stored once."""
        step, params = other.restore_params(model, averaged=self.averaged)
        programs = None if model is self.model else self.thread.engine.make_programs(model)
        weights = self.thread.engine.load(params, f"step {step}", programs, donate=True)
        weights = share_equal_arrays(weights, self.served.weights)
        return ServedRun(other, self.thread, model, Served(name, weights), step, self.averaged)

    def follow(self) -> None:
        """Takes each newer checkpoint, until the process ends; a damaged one is reported and left out."""
        while True:
            time.sleep(RELOAD_SECONDS)
            try:
                self.take_newer()
            except (RunError, UsageError, OSError) as error:  # such as a checkpoint that was pruned while it was read
                print(f"no newer checkpoint is taken: {error}", file=sys.stderr, flush=True)

    def take_newer(self) -> bool:
        """Gives new requests the newest checkpoint; requests in flight end with the weights they started with."""
        for step in reversed([step for step in checkpoint.list_steps(self.run.out) if step > self.step]):
            try:
                _, params = self.run.restore_params(self.model, step, self.averaged)
            except checkpoint.Damaged as error:
                print(f"{error}; step {self.step} is still served", file=sys.stderr, flush=True)
                continue
            self.served.weights = self.thread.engine.load(params, f"step {step}", donate=True)
            self.step = step
            self.thread.metrics.reloads += 1
            print(f"step {step} is served", file=sys.stderr, flush=True)
            return True
        return False


def share_equal_arrays(weights: Weights, others: Weights) -> Weights:
    """Returns the weights with the other's arrays wherever both are equal, so that these exist once."""
    known = dict(jax.tree.leaves_with_path(others.unstacked))

    def choose(path, leaf):
        other = known.get(path)
        same = other is not None and (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        return other if same and np.array_equal(np.asarray(leaf), np.asarray(other)) else leaf

    return dataclasses.replace(weights, unstacked=jax.tree.map_with_path(choose, weights.unstacked))
