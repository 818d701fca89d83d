"""The scores and samples of a run's weights, and of their average, at some of its steps."""

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from shardformer.config import Config
from shardformer.data import Data
from shardformer.devices import processes
from shardformer.errors import RunError
from shardformer.files import GrowingFile, expand_home, read_bytes, replacing
from shardformer.inference import Generator, Sampling, Stops, lm_eval_answers
from shardformer.inference.lm_eval_answers import Answers
from shardformer.inference.prompts import read_prompts
from shardformer.inference.text_codec import Switch, TextCodec
from shardformer.layout import mesh
from shardformer.messages import log
from shardformer.model import Model
from shardformer.optim import average
from shardformer.training.evaluation import Evaluator
from shardformer.training.host_feature import HostFeature
from shardformer.training.outputs import Outputs
from shardformer.training.run_folder import Run
from shardformer.training.step import TrainState

MAX_BYTES = 1 << 30


class JsonLines:
    """The file at `path`; records after `first_step` are dropped when it is opened."""

    def __init__(self, path: Path, first_step: int):
        self._end = GrowingFile(path)
        retained = _read_lines(path, first_step) if first_step else []
        if retained or path.exists():
            with replacing(path) as temporary:
                temporary.write_bytes(b"".join(line + b"\n" for line in retained))

    def append(self, record: dict) -> None:
        """Writes one line. Lines that a full disk rejects stay pending until the next call."""
        self._end.append(json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


def _read_lines(path: Path, last_step: int) -> list[bytes]:
    """Returns the lines up to a step; a last line without its line feed was cut by a kill."""
    try:
        lines = read_bytes(path, MAX_BYTES).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [line for number, line in enumerate(lines, start=1) if _read_step(path, number, line) <= last_step]


def _read_step(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise RunError(
            f"{path}, line {number}, is not a record with a step: {line[:200].decode(errors='replace')!r}; "
            "remove that line to continue"
        ) from None


TOKENS = 64  # of the continuation of a prompt
ROWS = 8  # rows that are computed together, as in `harness`


def split_tasks(listed: str) -> tuple[list[str], list[str]]:
    """Returns the names of the tasks in 'arc_easy,FOLDER/NAME', and the folders of the user's own tasks."""
    paths = [Path(expand_home(word.strip())) for word in listed.split(",") if word.strip()]
    folders = sorted({str(path.parent) for path in paths if len(path.parts) > 1})
    return [path.name for path in paths], folders


@functools.cache
def open_tasks(listed: str) -> tuple[list[str], Any]:
    """Returns the names and the manager of the tasks that eval_tasks lists; the harness needs seconds to import."""
    from shardformer.inference import lm_eval_adapter

    names, folders = split_tasks(listed)
    return names, lm_eval_adapter.find_tasks(names, folders)


def encode_prompts(run: Run, prompts: list[str]) -> tuple[TextCodec, list[list[int]]]:
    """Returns the codec of eval_prompts and their ids; raises UsageError for characters that no token has."""
    codec = _open_codec(run, "auto")
    return codec, codec.encode_all(prompts, "eval_prompts: prompt")


def _open_codec(run: Run, special_tokens: Switch) -> TextCodec:
    return TextCodec(run.vocabulary, run.special_tokens, run.config.data.bos, special_tokens, not run.fingerprint)


class Stopped(Exception):
    """A stop was requested before the last score."""


class Monitor(HostFeature):
    """The scores of a run's weights while it trains, and its continuations of `eval_prompts`.

    The programs are compiled once.
    """

    def __init__(self, config: Config):
        if config.start.eval_tasks:
            lm_eval_answers.check_installed("eval_tasks")
            open_tasks(config.start.eval_tasks)
        prompts = config.start.eval_prompts
        self._prompts = read_prompts(prompts, key="eval_prompts") if prompts else []

    def check(self, run: Run, corpus: Data) -> None:
        if self._prompts:
            encode_prompts(run, self._prompts)

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        """Opens the records. `is_stopped` is asked before each batch of rows."""
        first_step = int(state.step)
        self._run, self._config, self._is_stopped = run, run.config, is_stopped
        settings = run.config.for_inference(run.config.parallel.mesh)
        self._model = Model.on(settings, mesh.make(settings))
        self._tasks: Any = self._open_tasks() if run.config.start.eval_tasks else None
        self._writer: Any = self._open_writer() if self._prompts else None
        self._files = processes.succeed_or_fail_together(lambda: self._open_files(first_step))

    def _open_files(self, first_step: int) -> dict[str, JsonLines]:
        """Opens the records on the first process."""
        if jax.process_index():
            return {}
        names = [name for name, used in (("scores", self._tasks), ("texts", self._writer)) if used]
        return {name: JsonLines(self._run.records / f"{name}.jsonl", first_step) for name in names}

    def after_evaluation(self, state: TrainState, step: int, outputs: Outputs) -> None:
        """Scores the weights of the evaluated state and their average; a stop leaves out the rest."""
        self._try_to_write = outputs.checkpoints.try_to_write
        try:
            with outputs.throughput.pause():
                for name, params in self._select_weights(state, step):
                    if self._tasks:
                        self._score(params, step, name)
                    if self._writer:
                        self._write_texts(params, step, name)
        except Stopped:
            log.info(f"the scores of step {step} are incomplete, because of the stop")

    def _select_weights(self, state, step: int) -> Iterator[tuple[str, Any]]:
        yield "last", self._place(state.params)
        if self._config.training.ema:
            means = average.replace_by_average(state.average, state.params, step, self._config)
            yield "average", self._place(means)

    def _place(self, params):
        """Returns the parameters that inference reads."""
        return jax.device_put({module: params[module] for module in self._model.shardings}, self._model.shardings)

    def _open_tasks(self):
        """Returns the answers, the names of the tasks and their manager."""
        codec = _open_codec(self._run, "true")  # `hf` recognises special tokens in every text
        answers = Answers(self._model, None, codec, ROWS, before_batch=self._raise_if_stopped)
        return answers, *open_tasks(self._config.start.eval_tasks)

    def _score(self, params, step: int, weights: str) -> None:
        from shardformer.inference import lm_eval_adapter

        started = time.monotonic()
        answers, names, manager = self._tasks
        answers.params = params
        with _quiet_harness():
            results = lm_eval_adapter.evaluate(
                answers, manager, names, limit=self._config.start.eval_limit or None,
                log_samples=False, random_seed=0, fewshot_random_seed=0,
            )  # fmt: skip
        answers.params = None  # frees the copy
        scores = {task: _select_values(result) for task, result in results["results"].items()}
        seconds = round(time.monotonic() - started, 2)
        self._append("scores", {"step": step, "weights": weights, "scores": scores, "seconds": seconds})
        listed = "; ".join(f"{task} {_format_numbers(result)}" for task, result in scores.items())
        log.info(f"step {step}, {weights} weights: {listed} ({seconds:.1f} s)")

    def _open_writer(self):
        codec, ids = encode_prompts(self._run, self._prompts)
        return Generator(self._model), codec, ids, Stops(codec.vocabulary, (), codec.ends)

    def _write_texts(self, params, step: int, weights: str) -> None:
        generator, codec, ids, stops = self._writer
        sampling = Sampling(tokens=TOKENS, temperature=0.0)

        def watch(*_) -> None:
            self._raise_if_stopped()

        rows = generator.stream(params, ids, sampling, len(codec.vocabulary), stops, watch, ROWS)
        for prompt, row in zip(self._prompts, rows, strict=True):
            text = stops.cut(row.ids)
            self._append("texts", {"step": step, "weights": weights, "prompt": prompt, "text": text})

    def _append(self, name: str, record: dict) -> None:
        if name in self._files:
            self._try_to_write(lambda: self._files[name].append(record))

    def _raise_if_stopped(self) -> None:
        if self._is_stopped():
            raise Stopped


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Keeps the harness's reports out of the display of the training."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _select_values(result: dict) -> dict[str, float]:
    return {name: value for name, value in result.items() if isinstance(value, (int, float))}


def _format_numbers(scores: dict[str, float]) -> str:
    printed = {name.removesuffix(",none"): value for name, value in scores.items() if "_stderr" not in name}
    return ", ".join(f"{name} {value:.4g}" for name, value in printed.items())
