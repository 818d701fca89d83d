"""Runs of ours as arrays that are read one by one: the one place where conversions meet run folders and checkpoints."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax

from shardformer import checkpoint
from shardformer.checkpoint import array_files, leaf_names, manifest
from shardformer.checkpoint.manifest import Leaf
from shardformer.config import Config
from shardformer.convert.gptj import Leaves
from shardformer.convert.gptj_state import Moments, State
from shardformer.convert.leaves import Filled, Readable, constant, flatten, nest
from shardformer.errors import RunError, UsageError
from shardformer.model import lora
from shardformer.parallel import mesh
from shardformer.storage import BucketPath
from shardformer.training.run_folder import Best, Run
from shardformer.training.step import Trainer


@contextlib.contextmanager
def open_state(run: Run, step: int, with_moments: bool, averaged: bool = False) -> Iterator[State]:
    """A checkpoint of a run: the best by validation unless `step` says otherwise. averaged: see Run.restore_params.

    Its arrays are read where they are indexed, until the end of the block.
    """
    trainer = _trainer(run.config)
    step = run.choose_step(step, averaged)
    folder = checkpoint.step_folder(run.out, step)
    run.check_config(folder)
    stored = manifest.read_manifest(folder)
    with array_files.Reader(folder, stored) as reader:

        def readable(name: str) -> Readable:
            leaf = stored.leaves[name]
            return Readable(leaf.shape, np.dtype(leaf.dtype), lambda box: reader.read_slices(name, [box])[box])

        def readables(part: str, names) -> Leaves:
            shapes = flatten(trainer.model.shapes)
            for name, place in names.items():
                got = stored.leaves[place].shape if place in stored.leaves else None
                if got != shapes[name].shape:
                    raise RunError(f"{folder}: {part}/{name} is {got}, and config.json makes it {shapes[name].shape}")
            return {name: readable(place) for name, place in names.items()}

        params = {name: f"params/{name}" for name in flatten(trainer.model.shapes)}
        if averaged and step:
            params = {name: mean if (mean := f"average/{name}") in stored.leaves else of for name, of in params.items()}
        moments = None
        if with_moments:
            places = _moment_places(trainer)
            if places.count in stored.leaves:  # a converted run has no optimizer yet
                count = int(readable(places.count)[...])
                moments = Moments(count, readables("mu", places.mu), readables("nu", places.nu))
        yield State(step, readables("params", params), moments)


def write_run(folder: Path | BucketPath, run: Run, state: State) -> None:
    """Writes a run with one checkpoint, for now in `folder`.

    Without moments the checkpoint holds no optimizer, whose zeros would triple its size: a resume starts them anew.
    """
    for name in ("param_dtype", "moment_dtype"):
        if getattr(run.config, name) != "float32":
            raise UsageError(
                f"a converted run is in float32: give {name}=float32, and {name}=bfloat16 to `train base={run.out}`"
            )
    trainer = _trainer(run.config)
    whole = {"step": constant((), np.int32, state.step), "params": nest(trainer.model.shapes, state.params)}
    if state.moments:
        whole["optimizer"] = _make_optimizer(trainer, state.moments)
    texts = run.documents(state.step, Best())
    checkpoint.save_snapshot(folder, state.step, _streamed(leaf_names.flatten(whole)), texts)
    for name in sorted(texts.keys() - {"progress.json"}, key="config.json".__eq__):  # which makes it a run, comes last
        (folder / name).write_bytes(texts[name].encode())


class _Streamed(checkpoint.Snapshot):
    """Arrays that come into being one after the other, in the memory of the largest."""

    def slices(self):
        arrays = [(name, index, array) for name, [(index, array)] in self.owned.items()]
        memory = np.empty(max(_nbytes(array) for _, _, array in arrays), np.uint8)
        for name, index, array in arrays:
            whole = memory[: _nbytes(array)].view(array.dtype).reshape(array.shape)
            array.fill(whole)
            yield name, index, whole


def _streamed(arrays: dict[str, Filled]) -> checkpoint.Snapshot:
    leaves = {name: Leaf(array.dtype.name, array.shape, None, None, ()) for name, array in arrays.items()}
    owned = {name: [(tuple((0, size) for size in array.shape), array)] for name, array in arrays.items()}
    return _Streamed(leaves, owned)


def _nbytes(array: Filled) -> int:
    return array.dtype.itemsize * int(np.prod(array.shape, dtype=np.int64))


def _make_optimizer(trainer: Trainer, moments: Moments):
    """Makes the optimizer's state with these moments."""
    # A state at its start has one value in each leaf, whatever the parameters and their sizes are.
    learned = lora.select_learned(trainer.model.shapes, trainer.config)
    small = jax.tree.map(lambda leaf: jax.numpy.zeros((1,) * leaf.ndim), learned)
    initial = jax.tree.map(
        lambda leaf, like: constant(like.shape, like.dtype, np.asarray(leaf).ravel()[0]),
        trainer.optimizer.init(small),
        trainer.abstract.optimizer,
    )
    if _adam(initial, trainer) is None:
        raise UsageError(
            f"{_settings(trainer.config)} has no place for Adam's two moments of every parameter, as SRC has them; "
            "give optimizer=adamw lr_rules="
        )
    mu, nu = (nest(trainer.model.shapes, moment) for moment in (moments.mu, moments.nu))
    return optax.tree.set(initial, count=constant((), np.int32, moments.count), mu=mu, nu=nu)


def _moment_places(trainer: Trainer) -> Moments:
    """Under which names a checkpoint has Adam's moments."""
    abstract = {"optimizer": trainer.abstract.optimizer}
    places = leaf_names.unflatten(abstract, {name: name for name in leaf_names.flatten(abstract)})
    found = _adam(places["optimizer"], trainer)
    if found is None:
        raise UsageError(
            f"{_settings(trainer.config)} does not keep Adam's two moments of every parameter, and GPT-J has no other "
            "state; give moments=false"
        )
    count, mu, nu = found
    return Moments(count, flatten(mu), flatten(nu))


def _adam(optimizer, trainer: Trainer):
    """Adam's (count, mu, nu) where an optimizer's state has them of every parameter."""
    try:
        count, mu, nu = (optax.tree.get(optimizer, name) for name in ("count", "mu", "nu"))
    except KeyError:  # there are several
        return None
    complete = jax.tree.structure(mu) == jax.tree.structure(nu) == jax.tree.structure(trainer.model.shapes)
    return (count, mu, nu) if complete else None


def _settings(config: Config) -> str:
    return f"optimizer={config.optimizer}{config.lr_rules and f' lr_rules={config.lr_rules}'}"


@functools.lru_cache(maxsize=4)
def _trainer(config: Config) -> Trainer:
    alone = config.replace(mesh="1x1", coordinator="", processes=0, process_id=0)
    return Trainer(alone, mesh.make(alone))
