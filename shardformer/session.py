"""A run from Python: open it, train it, evaluate it. The command line parses, calls this module and prints.

    run = Session.create(preset("tiny", out="checkpoints/tiny"))    # or Session.resume("checkpoints/tiny", steps=80)
    trained = run.train()
    print(trained.best, trained.evaluate())

A notebook may supply batches and validation (`OwnBatches`), an evaluation and a sink of metrics.
"""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from shardformer import checkpoint, data, jax_releases, start_messages, storage
from shardformer.analysis.needed_bytes import predict_unless_small
from shardformer.checkpoint import Lock
from shardformer.config import Config, check_given, check_zero
from shardformer.data import Characters, Data, TokenIds, Vocabulary
from shardformer.data.digests import OWN
from shardformer.data.source import Progress
from shardformer.devices import processes, programs
from shardformer.devices.programs import EarlyWork
from shardformer.errors import RunError, UsageError
from shardformer.files import replacing
from shardformer.layout import mesh
from shardformer.logs import command_start, goodput
from shardformer.logs.observers import Observer
from shardformer.messages import log
from shardformer.model import Model
from shardformer.storage import BucketPath
from shardformer.training import loop
from shardformer.training.checkpoint_progress import Best, read_progress
from shardformer.training.evaluation import Evaluation, Evaluator
from shardformer.training.features_on_host import open_features
from shardformer.training.host_feature import HostFeature
from shardformer.training.run_folder import Run, check_links
from shardformer.training.stop_signal import StopSignal
from shardformer.training.trainer import Trainer

if TYPE_CHECKING:
    from shardformer.model.task import Task


def log_lines(lines: Iterable[str]) -> None:
    for line in lines:
        log.info(line)


def ignore_progress(done: int, total: int) -> None:
    """Shows nothing while documents are tokenised."""


@dataclasses.dataclass(frozen=True)
class Session:
    """One start of a run: from its newest checkpoint, or from step 0, to its last step or to a stop.

    >>> from shardformer import Session, preset
    >>> session = Session.create(preset("tiny", out="checkpoints/no_such_run"))
    >>> session.is_new, len(session.corpus.vocabulary)
    (True, 63)

    `session.train()` trains it and returns `Trained`; `Session.resume("checkpoints/tiny", steps=80)` continues a run.

    Arguments:
      run: its folder, configuration and vocabulary.
      corpus: its batches.
      features: what the run does on the host besides its steps.
      previous: the configuration of the checkpoint that the run continues; None for a run from step 0.
      is_new: the run's folder does not exist yet.
    """

    run: Run
    corpus: Data
    features: tuple[HostFeature, ...]
    previous: Config | None = None
    is_new: bool = True

    @staticmethod
    def create(
        config: Config,
        corpus: Data | None = None,
        progress: Progress = ignore_progress,
        task: "Task | None" = None,
    ) -> "Session":
        """Opens a new run.

        Arguments:
          corpus: replaces the data that the configuration names.
          progress: is called with (done, total) while documents are tokenised.
          task: is trained instead of the language model; `resume` takes it too.
        """
        config = config.replace(task=task) if task else config
        if config.lora.lora_rank and not config.training.base:
            raise UsageError("lora_rank trains adapters beside the frozen weights of a trained run; name it: base=RUN")
        features = open_features(config)
        for feature in features:
            corpus = feature.open_data(config, corpus)
        if corpus is None:
            Run(config, TokenIds(config.model.vocab or 1), "").refuse_to_overwrite()  # before the data are read
            vocabulary = open_vocabulary_of_base(config) if config.training.base else None
            corpus = data.load_corpus(config, vocabulary, progress)
        run = Run.create(config, corpus)
        run.refuse_to_overwrite()
        return Session(run, corpus, features)

    @staticmethod
    def resume(
        folder: Path | BucketPath | str,
        corpus: Data | None = None,
        progress: Progress = ignore_progress,
        **changes,
    ) -> "Session":
        """Reopens the run in a folder, with keys that a resume may change."""
        check_links(storage.location(folder))
        run = Run.open(folder, changes)
        previous = checkpoint.read_config(run.stored)
        check_given(run.config, {key: value for key, value in changes.items() if value != previous.get(key)})
        _check_newest(run)
        features = open_features(run.config)
        for feature in features:
            corpus = feature.open_data(run.config, corpus)
        if corpus is None:
            if "data" not in changes:
                _check_fingerprint(run, previous)
            corpus = data.load_corpus(run.config, run.vocabulary, progress, resumes=True)
        run.check_corpus(corpus)
        run = run.with_corpus(corpus)
        _check_newest(run)  # again, as epochs= may be fewer steps
        _check_text_field(run.config, previous)
        return Session(run, corpus, features, previous, is_new=False)

    @staticmethod
    def branch(
        config: Config,
        previous: Config,
        progress: Progress = ignore_progress,
        *,
        names_data: bool = False,
    ) -> "Session":
        """Opens a new run that continues the checkpoint that its `base` names, created with `previous`.

        Arguments:
          names_data: the user has named the data of `config`, which a run without a fingerprint needs.
        """
        source = Run.open(config.training.base_run)
        run = dataclasses.replace(source, config=config)
        run.refuse_to_overwrite()
        if not names_data:
            _check_fingerprint(source, config)
        features = open_features(config)
        corpus = data.load_corpus(config, source.vocabulary, progress, resumes=True)
        source.check_corpus(corpus)
        run = run.with_corpus(corpus)
        if (steps := run.config.training.steps) <= config.training.base_step:
            more = "epochs" if config.training.epochs else "steps"
            raise UsageError(
                f"base={config.training.base} leaves no step to train, got steps={steps}; give more {more}"
            )
        return Session(run, corpus, features, previous)

    def train(
        self,
        stop: StopSignal | None = None,
        sink: Observer | None = None,
        evaluate: Callable[[Any], float] | None = None,
    ) -> "Trained":
        """Trains to the last step, or until a stop, which saves.

        Arguments:
          stop: receives the signals that ask for a stop; by default, created here (then call from the main thread).
          sink: receives the row of every logged step by write(row), in a separate thread, and close().
          evaluate: returns a loss of the parameters, instead of the loss on the validation split.
        """
        if stop is None:
            with StopSignal() as stop:
                return self.train(stop, sink, evaluate)
        with contextlib.ExitStack() as stack:
            for feature in self.features:
                feature.check(self.run, self.corpus)
            run = self._on_devices()
            programs.keep_compiled_programs(run.config, processes.gather_texts)
            stack.enter_context(processes.ending_all_on_failure())
            run.check_same_start()
            trainer = Trainer(run.config, mesh.make(run.config))
            lock = stack.enter_context(run.locked())
            if self.is_new:  # check a second time: another run may have started and ended there while this one waited
                processes.run_on_first_process(run.claim_folder)
            log_lines(start_messages.describe_start(run, self.corpus, trainer.model))
            early = None
            is_one_program = run.config.training.accum_mode == "scan"
            if programs.saves_time() and is_one_program and self.corpus.has_known_arrays(run.config):
                early = _compile_early(trainer)  # first: it is the longest to compile
                stack.callback(early.wait)
            state, best = run.restore(trainer)
            log_lines(start_messages.describe_position(run, self.previous, self.is_new, int(state.step), trainer.model))
            evaluator = Evaluator(trainer, self.corpus, evaluate)
            for feature in self.features:
                feature.prepare(run, evaluator, state, stop.is_requested)
            log_lines(start_messages.describe_evaluated_share(evaluator))
            batches = evaluator.corpus.train_batches(run.config, int(state.step), evaluator.trainer.local_rows)
            stack.callback(batches.close)
            run.write_documents()
            if lock:
                importing = EarlyWork(lambda: importlib.import_module("shardformer.logs.curves"))
                stack.callback(importing.wait)  # an import while the interpreter ends could abort the process
            if early:
                with goodput.CLOCK.spending("compile"):
                    early.wait()
            try:
                best = loop.train(run, evaluator, batches, state, best, stop, lock, sink, self.features)
            finally:
                with goodput.CLOCK.spending("evaluation"):
                    draw_curves(run, lock)
            return Trained(run, evaluator, best, stopped=stop.is_obeyed)

    def _on_devices(self) -> Run:
        """Starts JAX, and returns the run with its mesh, which mesh=auto chooses from the devices."""
        check_zero(self.run.config)
        config = mesh.start(self.run.config, predict_unless_small, self.previous)
        warn_of_compiler()
        check_zero(config)  # check a second time, as mesh=auto has a shape now
        return dataclasses.replace(self.run, config=config)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run after training.

    Arguments:
      run: with the mesh on which it was trained.
      best: the step and the validation loss of the best checkpoint.
      stopped: a signal stopped it before its last step.
    """

    run: Run
    evaluator: Evaluator
    best: Best
    stopped: bool

    def evaluate(self, is_stopped: Callable[[], bool] = lambda: False) -> dict[str, Evaluation]:
        """Evaluates the best checkpoint on all held-out data by split, and writes final.json."""
        step, params = self.run.restore_params(self.evaluator.trainer.model, self.best.step)
        losses = self.evaluator.evaluate_splits(self.evaluator.corpus.held_out, params, is_stopped)
        if jax.process_index() == 0:
            unit = self.run.config.objective.unit
            report = {"step": step} | {split: result.to_record(unit) for split, result in losses.items()}
            with replacing(self.run.records / "final.json") as temporary:
                temporary.write_text(json.dumps(report, indent=2) + "\n")
            storage.upload_records(self.run.out)
        return losses

    def load_best(self) -> tuple[Model, Any, int]:
        """Returns a model that samples, the parameters of the best checkpoint, and its step."""
        model = make_sampling_model(self.run, self.evaluator)
        step, params = self.run.restore_params(model, self.best.step)
        return model, params, step


def make_sampling_model(run: Run, evaluator: Evaluator) -> Model:
    """Returns a model that samples: the one that is trained, or one without stages or layers of training."""
    settings = run.config.objective.without_training_layers().without_stages()
    return evaluator.trainer.model if settings is run.config else Model.on(settings, mesh.make(settings))


def _compile_early(trainer: Trainer) -> EarlyWork:
    """Lowers the step here, which needs the interpreter's lock, and compiles it in a thread."""
    lowered = trainer.lower(trainer.abstract, trainer.abstract_batch)
    return EarlyWork(lambda: [program.compile() for program in lowered])


def warn_of_compiler() -> None:
    """Warns a program of the user of the installed JAX's faults; a command runs only this package's tested programs."""
    fault = "" if command_start.is_command() or jax.default_backend() != "cpu" else jax_releases.describe_faults()
    if fault and jax.process_index() == 0:
        log.warning(fault)


def _check_newest(run: Run) -> None:
    """Rejects a last step that the newest checkpoint is beyond."""
    if newest := checkpoint.newest_step_folder(run.out):
        with contextlib.suppress(RunError):  # damaged: an earlier checkpoint may serve
            _check_steps(run, read_progress(newest).step)


def _check_steps(run: Run, step: int) -> None:
    """Rejects a last step that a checkpoint is beyond."""
    if step > run.config.training.steps:
        raise UsageError(f"{run.out} is at step {step} already, got steps={run.config.training.steps}; give more")


def _check_fingerprint(run: Run, stored: Config) -> None:
    """Rejects data that cannot be opened again, or that no fingerprint shows to be the run's.

    A stranger's run could name any local file.
    """
    if run.fingerprint.startswith(OWN):
        raise UsageError(
            f"{run.out} was trained on batches that a program supplied, {run.fingerprint}; supply them again: "
            "Session.resume(FOLDER, OwnBatches(...))"
        )
    if stored.data.source and not run.fingerprint:
        raise UsageError(f"{run.out} names data={stored.data.source}, but has no fingerprint of it; give data= again")


def _check_text_field(config: Config, previous: Config) -> None:
    """Rejects another text= for the same corpus, which does not read the field then."""
    unmoved = (config.data.source, config.data.validation) == (previous.data.source, previous.data.validation)
    if unmoved and config.data.text != previous.data.text:
        raise UsageError(
            f"text={config.data.text} does nothing: {config.data.source} is the same with "
            f"text={previous.data.text}; leave it out"
        )


def draw_curves(run: Run, lock: Lock | None) -> None:
    """Draws curves.png; a failure is printed and does not fail the run."""
    if lock and (run.records / "metrics.csv").exists():
        try:
            from shardformer.logs import curves  # matplotlib, which `train` imports while XLA compiles

            log.info(f"curves: {curves.draw_curves(run.records, run.config.objective.unit)}")
            lock.check_still_locked()
            storage.upload_records(run.out)
        except Exception as error:
            log.info(f"curves.png was not drawn: {error}")


def open_vocabulary_of_base(settings: Config) -> Vocabulary:
    """Returns the tokenizer of the base; a base of bare token ids uses the tokenizer that is named."""
    base, wanted = Run.open(settings.training.base_run), settings.data.tokenizer
    vocabulary = base.vocabulary
    if wanted not in ("auto", base.config.data.tokenizer):
        made_from_text = wanted == Characters.name or wanted.startswith("bpe:")
        named = None if made_from_text else data.open_vocabulary(wanted, base.config.model.vocab)
        same = named is not None and named.without_options() == vocabulary.without_options()
        if named is None or not (same or isinstance(vocabulary, TokenIds)):
            raise UsageError(
                f"tokenizer={wanted} contradicts base={settings.training.base}, which was trained on tokens of "
                f"{base.config.data.tokenizer}; leave it out"
            )
        vocabulary = named
    if settings.data.bos != "auto":
        vocabulary = vocabulary.with_beginning(settings.data.bos, base.special_tokens.first)
    return vocabulary.with_special_tokens() if settings.data.special_tokens else vocabulary
