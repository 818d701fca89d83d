"""`convert RUN DST merge_lora=true`: adds a run's adapters to its weights."""

import dataclasses
import functools

import numpy as np

from shardformer.config.keys import key
from shardformer.convert.gptj import Array
from shardformer.convert.gptj_state import State
from shardformer.convert.leaves import Filled, copy_into
from shardformer.errors import UsageError
from shardformer.model import lora
from shardformer.training.run_folder import Run


@dataclasses.dataclass(frozen=True)
class Merging:
    """A run with adapters to a run without."""

    merge_lora: bool = key(True, "merge the adapters into the weights")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "merge the average of the adapters (for a run trained with ema)")

    def __post_init__(self):
        if not self.merge_lora:
            raise UsageError("merge_lora=false has no effect; leave it out, or give merge_lora=true")


def asks_to_merge(arguments: list[str]) -> bool:
    return any(word.partition("=")[0] == "merge_lora" for word in arguments)


def check_adapters(run: Run) -> None:
    if not run.config.lora.lora_rank:
        raise UsageError(
            f"{run.out} was trained with lora_rank={run.config.lora.lora_rank}: it has no adapters to merge"
        )


def merge_adapters(run: Run, state: State) -> tuple[Run, State]:
    """Returns the run and its state without adapters; each layer is merged when it is written."""

    def fill(name: str, whole: np.ndarray) -> None:
        module, _, local = name.rpartition("/")
        adapted = [name, f"{name}{lora.IN}", f"{name}{lora.OUT}"]
        if adapted[1] not in state.params:
            copy_into(whole, state.params[name])
            return
        for layer in range(len(whole)):  # those that have the matrix
            exact = {other: np.asarray(state.params[other][layer], np.float32) for other in adapted}
            leaves = {other.removeprefix(f"{module}/"): leaf for other, leaf in exact.items()}
            whole[layer] = lora.merge_adapters(leaves, run.config)[local]

    params: dict[str, Array] = {
        name: Filled(leaf.shape, np.dtype(np.float32), functools.partial(fill, name))
        for name, leaf in state.params.items()
        if not lora.is_adapter(name)
    }
    settings = run.config.replace(
        lora_rank=0, base="", ema=0.0, lr_rules="", param_dtype="float32", moment_dtype="float32"
    )
    return dataclasses.replace(run, config=settings), State(state.step, params)
