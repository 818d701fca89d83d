"""The log-probabilities of preference pairs under the model that a run starts from, computed once before it trains.

They are stored beside the run with sha256 digests of that model's weights and of the data. Parts that are complete
survive a kill; a resume reads the file, and no step computes a reference.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer import storage
from shardformer.data import Data
from shardformer.data.chat.preference_windows import PreferenceSplit, PreferenceWindows
from shardformer.data.corpus import choose_row_layout
from shardformer.devices import processes, programs
from shardformer.errors import RunError
from shardformer.files import make_folder, read_bytes, read_text, replacing
from shardformer.messages import log
from shardformer.objectives.objective import Pairs
from shardformer.objectives.weight_digests import digest_weights
from shardformer.tables import format_count
from shardformer.training.evaluation import Evaluator
from shardformer.training.host_feature import HostFeature
from shardformer.training.run_folder import Run
from shardformer.training.step import TrainState
from shardformer.training.trainer import Trainer

FOLDER, INDEX = "references", "index.json"
MAX_BYTES = 1 << 30
HEADER_BYTES = 4096  # of a part, at most
BATCHES_OF_A_PART = 64  # computed between two writes


class PairReferences(HostFeature):
    """The references of an objective that compares with the weights that training starts from."""

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        """Adds the reference of every pair to the data, computed now or read from the run.

        At step 0, `state` has the weights of the reference. A later start makes them again only if the file is missing.
        """
        corpus, trainer, stored = evaluator.corpus, evaluator.trainer, References(run, evaluator.corpus)
        references = stored.read()
        if references is None:
            weights, references = _compute(run, trainer, corpus, stored, state)
            processes.run_on_first_process(functools.partial(stored.write, references, weights))
        evaluator.corpus = attach_references(corpus, references)

    def prepare_evaluation(self, run: Run, evaluator: Evaluator) -> None:
        references = References(run, evaluator.corpus).read()
        if references is None:
            raise RunError(f"{run.out} has no references of this data; `train --resume` computes them again")
        evaluator.corpus = attach_references(evaluator.corpus, references)


def _compute(
    run: Run, trainer: Trainer, corpus: Data, stored: "References", state: TrainState
) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the sha256 of the weights, and the references of each split."""
    if run.config.training.base_step:  # a branch: it has the reference of the run that it continues
        return _read_of_base(run, corpus)
    params = state.params if int(state.step) == 0 else run.make_first_state(trainer).params
    weights = digest_weights(params, trainer.model.sharding(P()))
    _check_weights(run, stored, weights)
    forward = _ReferencePass(trainer, params, f"{weights} {corpus.fingerprint}")
    splits = find_splits(corpus).items()
    return weights, {name: forward.compute(split, stored.part_folder(name), name) for name, split in splits}


def _read_of_base(run: Run, corpus: Data) -> tuple[str, dict[str, np.ndarray]]:
    stored = References(Run.open(run.config.training.base_run), corpus)
    if (references := stored.read()) is None:
        raise RunError(f"base={run.config.training.base} has no references of this data; resume that run once")
    return stored.weights, references


def _check_weights(run: Run, stored: "References", weights: str) -> None:
    if stored.weights and stored.weights != weights:
        raise RunError(
            f"{stored.folder} was computed with weights of sha256 {stored.weights[:12]}, and the run starts from "
            f"{weights[:12]}: base={run.config.training.base} has changed; restore it, or start a new run"
        )


def find_splits(corpus: Data) -> dict[str, PreferenceSplit]:
    """Returns the splits of pairs by `SOURCE/SPLIT`."""
    return {name: split for name, split in corpus.named_splits().items() if isinstance(split, PreferenceSplit)}


def attach_references(corpus: Data, references: dict[str, np.ndarray]) -> Data:
    """Returns the data with reference log-probabilities [pairs, 2] by `SOURCE/SPLIT`."""
    return corpus.with_splits(
        {name: dataclasses.replace(split, references=references[name]) for name, split in find_splits(corpus).items()}
    )


class References:
    """The file of a run, `references/`."""

    def __init__(self, run: Run, corpus: Data):
        self._out, self.folder, self._corpus = run.out, run.records / FOLDER, corpus
        self._columns = cast(Pairs, run.config.objective).stored_references
        self.weights = ""  # the sha256 of the weights that the index names

    def part_folder(self, name: str) -> Path:
        """Returns the folder of the parts of a split; their names do not depend on its path."""
        return self.folder / _shorten(name)

    def read(self) -> dict[str, np.ndarray] | None:
        """Returns the references of every split; None if they are not complete, or belong to other data."""
        index = processes.succeed_or_fail_together(self._read_index)
        if index is None:
            return None
        self.weights = index["weights"]
        if index["data"] != self._corpus.fingerprint:
            log.info("references: the data has changed, so that they are computed again")
            return None
        references = {}
        for name, split in find_splits(self._corpus).items():
            try:
                entry = index["splits"][_shorten(name)]
                values = np.array(entry["logp"], np.float32).reshape(-1, self._columns)
                is_valid = len(values) == split.count and _digest(values) == entry["sha256"]
            except (KeyError, TypeError, ValueError, OverflowError):
                is_valid = False
            if not is_valid:
                raise RunError(f"{self.folder / INDEX} is damaged; remove it, and the references are computed again")
            references[name] = values
        log.info(f"references: read from {self.folder}, of weights {self.weights[:12]} and data {index['data'][:12]}")
        return references

    def _read_index(self) -> dict | None:
        path = self.folder / INDEX
        try:
            index = json.loads(read_text(path, MAX_BYTES))
            if not all(isinstance(index[name], str) for name in ("weights", "data")) or "splits" not in index:
                raise ValueError("its values are not strings")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(
                f"{path} is damaged ({error!s:.100}); remove it, and the references are computed again"
            ) from None
        return index

    def write(self, references: dict[str, np.ndarray], weights: str) -> None:
        """Writes the index, and removes the parts that it replaces."""
        splits = {
            _shorten(name): {
                "split": name.rpartition("/")[2], "sha256": _digest(values),
                "logp": [float(value) for value in values.reshape(-1)],
            }
            for name, values in references.items()
        }  # fmt: skip
        make_folder(self.folder)
        with replacing(self.folder / INDEX) as temporary:
            content = {"weights": weights, "data": self._corpus.fingerprint, "splits": splits}
            temporary.write_text(json.dumps(content) + "\n")
        for name in references:
            folder = self.part_folder(name)
            for part in folder.glob("*.npy"):
                part.unlink()
            if folder.is_dir():
                folder.rmdir()
        storage.upload_records(self._out)


class _ReferencePass:
    """The compiled forward pass of the reference; `identity` names its weights and the data."""

    def __init__(self, trainer: Trainer, params, identity: str):
        self._trainer, self._params, self._identity = trainer, params, identity
        model = trainer.model
        self._measure = programs.jit(model.log_probabilities, out_shardings=model.sharding(P()))  # type: ignore[attr-defined]

    def compute(self, split: PreferenceSplit, folder: Path, name: str) -> np.ndarray:
        """Returns log-probabilities [pairs, columns] of a split, 0 for pairs without a row; goes on after a kill."""
        config = self._trainer.config
        windows = PreferenceWindows(split, choose_row_layout(config))
        rows_of_parts = [config.training.batch, config.model.seq, config.data.documents, BATCHES_OF_A_PART]
        identity = hashlib.sha256(json.dumps([self._identity, rows_of_parts]).encode()).hexdigest()[:16]
        columns = cast(Pairs, config.objective).stored_references
        result, size = np.zeros((split.count, columns), np.float32), config.training.batch
        batches = -(-windows.count // size)
        log.info(f"references: computing those of {format_count(len(windows.pairs), 'pair')} of {name}, batch={size}")
        for number, first in enumerate(range(0, batches, BATCHES_OF_A_PART)):
            path = folder / f"{identity}_{number:06d}.npy"
            rows = np.arange(first * size, min(first + BATCHES_OF_A_PART, batches) * size)
            values = _read_part(path, (len(rows) * windows.pairs_of_a_row, columns))
            if values is None:
                values = self._compute_part(windows, rows)
                processes.run_on_first_process(functools.partial(_write_part, path, values))
            for row, of_row in zip(rows.tolist(), values.reshape(len(rows), -1, columns), strict=True):
                members = windows.rows_of_pairs(row) if row < windows.count else []
                result[members] = of_row[: len(members)]
        return result

    def _compute_part(self, windows: PreferenceWindows, rows: np.ndarray) -> np.ndarray:
        """Returns the log-probabilities [slots, columns] of some rows, one row after the other."""
        size, parts = self._trainer.config.training.batch, []
        for start in range(0, len(rows), size):
            local = rows[start : start + size][self._trainer.local_rows]
            batch = self._trainer.to_devices(windows.gather(local))
            parts.append(np.asarray(self._measure(self._params, batch)))
        values = np.concatenate(parts).transpose(0, 2, 1)
        return values.reshape(-1, values.shape[-1])


def _read_part(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Returns a part that is complete on the first process's disk; every process decides alike."""
    values = None
    if jax.process_index() == 0:
        with contextlib.suppress(Exception):  # a damaged header raises nearly every type
            content = read_bytes(path, 4 * math.prod(shape) + HEADER_BYTES)
            values = np.asarray(np.load(io.BytesIO(content), allow_pickle=False), np.float32)
    is_complete = values is not None and values.shape == shape
    if not processes.text_of_first_process("complete" if is_complete else ""):
        return None
    return processes.array_of_first_process(np.zeros(shape, np.float32) if values is None else values)


def _write_part(path: Path, values: np.ndarray) -> None:
    make_folder(path.parent)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, values)


def _shorten(name: str) -> str:
    """Returns a short name of a split, without a path."""
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()
