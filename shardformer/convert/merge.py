"""`convert RUN DST merge_lora=true`: adds a run's adapters to its weights."""

import contextlib
import dataclasses
import functools

import numpy as np

from shardformer.adapters import lora
from shardformer.adapters.adapter_keys import is_adapter
from shardformer.config.names import MATRICES, is_stacked
from shardformer.convert import runs, stored_weights
from shardformer.convert.leaves import Array, Filled, Leaves, State, copy_into
from shardformer.errors import RunError, UsageError
from shardformer.training.run_folder import Run


def asks_to_merge(arguments: list[str]) -> bool:
    return any(word.partition("=")[0] == "merge_lora" for word in arguments)


def check_adapters(run: Run) -> None:
    if not run.config.lora.lora_rank:
        raise UsageError(
            f"{run.out} was trained with lora_rank={run.config.lora.lora_rank}: it has no adapters to merge"
        )


def choose_base(run: Run, state: State, onto: str, stack: contextlib.ExitStack) -> tuple[State, str]:
    """Returns the state with the weights that adapters are added to, and a line on how far the two kinds differ."""
    if not run.config.stored.quantized:
        if onto == "float":
            raise UsageError(f"onto=float is for a run with codes, and {run.out} stores float weights; leave it out")
        return state, ""
    exact = _open_base(run, stack)
    if exact is None:
        if onto == "float":
            raise UsageError(
                f"onto=float needs a run with the float weights that {run.out} started from, and its base="
                f"{run.config.training.base} has none; leave onto= out"
            )
        return state, f"\nonto the stored weights={run.config.stored.weights}, which the adapters were trained with"
    frozen = {name: leaf for name, leaf in exact.items() if leaf.shape and name.rpartition("/")[2] in MATRICES}
    drift = f"{stored_weights.measure_drift(state.params, frozen):.2%} of the matrices' root mean square"
    if onto == "stored":
        floats = f"the float weights of {run.config.training.base}"
        return state, f"\nonto the stored weights, as trained; {floats} differ by {drift}"
    merged = state._replace(params={**state.params, **exact})
    return merged, f"\nonto the float weights; the stored ones, with which the adapters were trained, differ by {drift}"


def _open_base(run: Run, stack: contextlib.ExitStack) -> Leaves | None:
    """Returns the float parameters that a run of adapters started from; None if there are none now."""
    if not run.config.training.base or run.config.training.base_step:
        return None
    try:
        base = Run.open(run.config.training.base_run)
    except (UsageError, RunError):
        return None
    if base.config.stored.quantized:
        return None
    return stack.enter_context(runs.open_state(base, 0, with_moments=False)).params


def merge_adapters(run: Run, state: State) -> tuple[Run, State]:
    """Returns the run and its state without adapters; each layer is merged when it is written."""

    def fill(name: str, whole: np.ndarray) -> None:
        if f"{name}{lora.IN}" not in state.params:
            copy_into(whole, state.params[name])
            return
        for layer in range(len(whole)):  # those that have the matrix
            fill_row(name, whole[layer], layer)

    def fill_row(name: str, target: np.ndarray, layer: int) -> None:
        module, _, leaf_name = name.rpartition("/")
        names = [other for other in (name, f"{name}{lora.IN}", f"{name}{lora.OUT}") if other in state.params]
        exact = {other: np.asarray(state.params[other][layer], np.float32) for other in names}
        leaves = {other.removeprefix(f"{module}/"): leaf for other, leaf in exact.items()}
        target[...] = lora.merge_adapters(leaves, run.config)[leaf_name]

    def make(name: str, shape: tuple[int, ...]) -> Filled:
        row = functools.partial(fill_row, name) if is_stacked(name) else None
        return Filled(shape, np.dtype(np.float32), functools.partial(fill, name), row)

    params: dict[str, Array] = {
        name: make(name, leaf.shape) for name, leaf in state.params.items() if not is_adapter(name)
    }
    settings = run.config.replace(
        lora_rank=0, weights="float", base="", ema=0.0, lr_rules="", param_dtype="float32", moment_dtype="float32"
    )
    return dataclasses.replace(run, config=settings), State(state.step, params)
