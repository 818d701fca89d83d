"""Runs as arrays that are read one by one: the only module of conversions that reads and writes runs."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax

from shardformer import checkpoint, data
from shardformer.adapters.adapter_keys import select_trainable
from shardformer.checkpoint import array_files, manifest
from shardformer.checkpoint.manifest import Leaf
from shardformer.config import Config
from shardformer.config.names import is_part
from shardformer.convert import stored_weights
from shardformer.convert.leaves import Filled, Leaves, Moments, Readable, State, constant, flatten, nest
from shardformer.data import Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.messages import log
from shardformer.model import master_weights
from shardformer.storage import BucketPath
from shardformer.training.checkpoint_progress import Best
from shardformer.training.run_folder import Run
from shardformer.training.trainer import Trainer


@contextlib.contextmanager
def open_state(
    run: Run,
    step: int,
    with_moments: bool,
    averaged: bool = False,
    with_codes: bool = False,
    before_rounding: bool = False,
    with_rewards: bool = False,
) -> Iterator[State]:
    """Opens a checkpoint of a run: the best by validation unless `step` names one. averaged: see Run.restore_params.

    Its arrays are read when they are indexed, until the end of the block. Codes are dequantised then, unless
    `with_codes` asks for them. Parameters of `quantize_aware` are rounded if the step is one of the rounded ones,
    unless `before_rounding` asks for their masters. Only `with_rewards` opens a model of rewards.
    """
    objective = run.config.objective
    if not (objective.has_vocabulary or (with_rewards and objective.reads_tokens)):
        fix = "; give format=hf or weights=" if objective.reads_tokens else ""
        raise UsageError(f"{run.out} trained {objective.trained}, and this conversion takes language models only{fix}")
    trainer = _trainer(run.config)
    step = run.choose_step(step, averaged)
    folder = checkpoint.step_folder(run.out, step)
    run.check_config(folder)
    stored = manifest.read_manifest(folder)
    with array_files.Reader(folder, stored) as reader:

        def readable(name: str) -> Readable:
            leaf = stored.leaves[name]
            return Readable(leaf.shape, np.dtype(leaf.dtype), lambda box: reader.read_slices(name, [box])[box])

        def readables(part: str, names: dict[str, str]) -> Leaves:
            shapes = flatten(trainer.model.shapes)
            for name, path in names.items():
                got = stored.leaves[path].shape if path in stored.leaves else None
                if got != shapes[name].shape:
                    raise RunError(f"{folder}: {part}/{name} is {got}, and config.json makes it {shapes[name].shape}")
            return {name: readable(path) for name, path in names.items()}

        params = {name: f"params/{name}" for name in flatten(trainer.model.shapes)}
        part = "average" if averaged and step else "masters" if before_rounding else "params"
        params = {name: other if (other := f"{part}/{name}") in stored.leaves else of for name, of in params.items()}
        moments = None
        if with_moments:
            count, mu, nu = _moment_places(trainer, run.config)
            if count in stored.leaves:  # a converted run has no optimizer yet
                moments = Moments(int(readable(count)[...]), readables("mu", mu), readables("nu", nu))
        leaves = readables("params", params)
        if part == "average" and not before_rounding and master_weights.have_code_values(run.config, step):
            leaves = stored_weights.round_to_codes(leaves, run.config)
        if run.config.stored.quantized and not with_codes:
            leaves = stored_weights.dequantize(leaves, run.config)
        yield State(step, leaves, moments)


def write_run(folder: Path | BucketPath, run: Run, state: State) -> None:
    """Writes a run with one checkpoint, for now in `folder`.

    A run with codes takes parameters that are codes as they are, and quantises others. Without moments the checkpoint
    has no optimizer, whose zeros would triple its size: a resume starts them anew.
    """
    for name, plain in (("param_dtype", "float32"), ("moment_dtype", "float32"), ("quantize_aware", "none")):
        if (given := run.config.get(name)) != plain:
            raise UsageError(
                f"a converted run has plain float32 weights: give {name}={plain}, and {name}={given} to `train "
                f"base={run.out}`"
            )
    if run.config.objective.only_in_training:
        raise UsageError(
            f"a converted run has the layers of its language model only: give objective=lm, and objective="
            f"{run.config.objective.name} to `train base={run.out}`"
        )
    trainer, params = _trainer(run.config), state.params
    if run.config.stored.quantized and not any(map(is_part, params)):
        params = stored_weights.quantize(params, run.config)
    whole = {"step": constant((), np.int32, state.step), "params": nest(trainer.model.shapes, params)}
    if state.moments and not run.config.stored.quantized:  # frozen weights have no moments
        whole["optimizer"] = _make_optimizer(trainer, state.moments, run.config)
    documents = run.documents(state.step, Best())
    checkpoint.save_snapshot(folder, state.step, _stream(manifest.flatten(whole)), documents)
    for name in sorted(
        documents.keys() - {"progress.json"}, key="config.json".__eq__
    ):  # which makes it a run, comes last
        (folder / name).write_bytes(documents[name].encode())


@dataclasses.dataclass(frozen=True)
class _Streamed(checkpoint.Snapshot):
    """A snapshot whose arrays are computed one after the other, in the memory of the largest."""

    arrays: dict[str, Filled]

    def slices(self):
        memory = np.empty(max(map(_nbytes, self.arrays.values())), np.uint8)
        for name, array in self.arrays.items():
            target = memory[: _nbytes(array)].view(array.dtype).reshape(array.shape)
            array.fill(target)
            yield name, _full_index(array), target


def _stream(arrays: dict[str, Filled]) -> _Streamed:
    leaves = {name: Leaf(array.dtype.name, array.shape, None, None, ()) for name, array in arrays.items()}
    # The shape and dtype of each array, without memory for its values.
    absent = {name: np.broadcast_to(np.zeros((), array.dtype), array.shape) for name, array in arrays.items()}
    return _Streamed(leaves, {name: [(_full_index(array), array)] for name, array in absent.items()}, arrays)


def _full_index(array: Filled | np.ndarray) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in array.shape)


def _nbytes(array: Filled) -> int:
    return array.dtype.itemsize * int(np.prod(array.shape, dtype=np.int64))


def _make_optimizer(trainer: Trainer, moments: Moments, config: Config):
    """Makes the optimizer's state with these moments."""
    # In the first state each leaf has a single value, which does not depend on the parameters or their sizes.
    trainable = select_trainable(trainer.model.shapes, trainer.config)
    small = jax.tree.map(lambda leaf: jax.numpy.zeros((1,) * leaf.ndim), trainable)
    initial = jax.tree.map(
        lambda leaf, like: constant(like.shape, like.dtype, np.asarray(leaf).ravel()[0]),
        trainer.optimizer.init(small),
        trainer.abstract.optimizer,
    )
    if config.optimizer.is_code or _adam(initial, trainer) is None:
        raise UsageError(
            f"{_settings(config)} has no place for Adam's two moments of every parameter, as SRC has them; "
            "give optimizer=adamw lr_rules="
        )
    mu, nu = (nest(trainer.model.shapes, moment) for moment in (moments.mu, moments.nu))
    return optax.tree.set(initial, count=constant((), np.int32, moments.steps), mu=mu, nu=nu)


def _moment_places(trainer: Trainer, config: Config) -> tuple[str, dict[str, str], dict[str, str]]:
    """Returns the names under which a checkpoint stores Adam's count and moments."""
    abstract = {"optimizer": trainer.abstract.optimizer}
    places = manifest.unflatten(abstract, {name: name for name in manifest.flatten(abstract)})
    result = None if config.optimizer.is_code else _adam(places["optimizer"], trainer)
    if result is None:
        raise UsageError(
            f"{_settings(config)} does not keep Adam's two moments of every parameter, and GPT-J has no other "
            "state; give moments=false"
        )
    count, mu, nu = result
    return count, flatten(mu), flatten(nu)


def _adam(optimizer, trainer: Trainer):
    """Returns Adam's (count, mu, nu) of an optimizer's state that has them for every parameter, else None."""
    try:
        count, mu, nu = (optax.tree.get(optimizer, name) for name in ("count", "mu", "nu"))
    except KeyError:  # there are two or more
        return None
    structures = [jax.tree.structure(tree) for tree in (mu, nu, trainer.model.shapes)]
    return (count, mu, nu) if structures.count(structures[0]) == len(structures) else None


def _settings(config: Config) -> str:
    return f"optimizer={config.optimizer.name}{config.optimizer.lr_rules and f' lr_rules={config.optimizer.lr_rules}'}"


@functools.lru_cache(maxsize=4)
def _trainer(config: Config) -> Trainer:
    alone = config.objective.as_language_model().without_own_optimizer()
    alone = alone.replace(mesh="1x1", coordinator="", processes=0, process_id=0)
    return Trainer(alone, mesh.make(alone))


def open_vocabulary(config: Config, first: int | None = None) -> tuple[Config, Vocabulary, str]:
    """Returns the configuration, the vocabulary of `tokenizer` and the fingerprint of `data`; both keys are optional.

    first: the beginning of text that the model was published with, for bos=true.
    """
    vocabulary = data.open_vocabulary(
        config.data.tokenizer, config.model.vocab, config.data.special_tokens, config.data.bos, first
    )
    if vocabulary.notice:
        log.info(vocabulary.notice)
    if len(vocabulary) > config.model.vocab:
        raise UsageError(
            f"tokenizer={config.data.tokenizer} has {len(vocabulary)} entries, and the model predicts "
            f"{config.model.vocab}; "
            "give the tokenizer that it was trained with"
        )
    config = config.replace(tokenizer=vocabulary.name)
    if config.data.source == "auto":
        return config.replace(data=""), vocabulary, ""
    corpus = data.load_corpus(config, vocabulary)
    return config.replace(data=corpus.name), vocabulary, corpus.fingerprint
