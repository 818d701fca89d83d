"""The runs of a server: their weights on the devices, and newer checkpoints of a run in training."""

import dataclasses
import sys
import time

import jax
import numpy as np

from shardformer import checkpoint
from shardformer.errors import RunError, UsageError
from shardformer.inference.serve.engine_thread import EngineThread
from shardformer.inference.serve.jobs import Weights
from shardformer.inference.serve.service import Served
from shardformer.model import Model
from shardformer.training.run_folder import Run

RELOAD_SECONDS = 10.0  # between two looks for a newer checkpoint


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
        weights = thread.engine.load(params, f"step {step}")
        return ServedRun(run, thread, model, Served(name, weights), step, averaged)

    def add(self, name: str, other: Run) -> "ServedRun":
        """Loads the best checkpoint of another run; arrays that are equal to this run's are stored once."""
        step, params = other.restore_params(self.model, averaged=self.averaged)
        loaded = ServedRun.load(other, name, self.thread, self.model, params, step, self.averaged)
        loaded.served.weights = share_equal_arrays(loaded.served.weights, self.served.weights)
        return loaded

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
            self.served.weights = self.thread.engine.load(params, f"step {step}")
            self.step = step
            self.thread.metrics.reloads += 1
            print(f"step {step} is served", file=sys.stderr, flush=True)
            return True
        return False


def share_equal_arrays(weights: Weights, others: Weights) -> Weights:
    """Returns the weights with the other's arrays wherever both are equal, so that these exist once."""

    def choose(own, other):
        same = own.dtype == other.dtype and np.array_equal(np.asarray(own), np.asarray(other))
        return other if same else own

    return Weights(jax.tree.map(choose, weights.unstacked, others.unstacked), weights.name)
