"""`train`: starts a new run or resumes one."""

import contextlib
import dataclasses

from shardformer import storage
from shardformer.cli.arguments import describe_depth, names_depth, parse_keys, parse_preset, run_folder, say, say_text
from shardformer.cli.loading import ShownProgress
from shardformer.cli.sample_command import sample_text
from shardformer.config import Config, check_zero, presets
from shardformer.config.parsing import split_checkpoint
from shardformer.devices import processes, programs
from shardformer.devices.programs import EarlyWork
from shardformer.errors import UsageError
from shardformer.inference import Generator, Sampling
from shardformer.logs import command_start, goodput, streams
from shardformer.session import Session, Trained, make_sampling_model
from shardformer.training.evaluation import EvaluationStopped, Evaluator, format_losses
from shardformer.training.host_feature import HostFeature
from shardformer.training.run_folder import Run
from shardformer.training.step import TrainState
from shardformer.training.stop_signal import StopSignal, print_line

LAST_STEPS = 50  # the programs of the sample are compiled beside these; a stop before them waits for no compilation


class SampleStopped(Exception):
    """A stop was requested before the last token of the sample."""


def train(arguments: list[str]) -> None:
    """Trains a new run of a preset, or resumes a run."""
    goodput.CLOCK.restart(command_start.take_start())
    with streams.lasting_output(), goodput.CLOCK.noting_compilation():
        session = open_session(arguments)
        check_zero(session.run.config)
        ending = choose_ending(session.run.config)
        session = dataclasses.replace(session, features=(*session.features, ending))
        with StopSignal() as stop:
            with contextlib.closing(ending):
                trained = session.train(stop)
                if not trained.stopped:
                    with goodput.CLOCK.spending("evaluation"):
                        finish(trained, ending, stop)
            if trained.stopped:
                say_how_to_resume(trained.run)
            say(goodput.CLOCK.finish())


def open_session(arguments: list[str]) -> Session:
    """Opens the run that the arguments name."""
    resumed = next((at for at, word in enumerate(arguments) if word.partition("=")[0] == "--resume"), None)
    with ShownProgress() as progress:
        if resumed is not None:
            folder, changes = _parse_resume(arguments[:resumed], arguments[resumed:])
            return Session.resume(folder, progress=progress.show, **changes)
        if names_step(arguments):
            from shardformer.cli.base_model import parse_branch  # not imported without a base

            names_data = any(word.startswith("data=") for word in arguments)
            return Session.branch(*parse_branch(arguments), progress.show, names_data=names_data)
        return Session.create(_parse_new(arguments), progress=progress.show)


def _parse_new(arguments: list[str]) -> Config:
    """Returns the configuration of a new run; a base or a teacher of Hugging Face becomes a run first."""
    if names_base(arguments):
        from shardformer.cli.base_model import parse_base  # not imported without a base

        config = parse_base(arguments)
    else:
        config = parse_preset(arguments)
        if names_depth(arguments):
            say(describe_depth(arguments))
    if config.preferences.teacher:
        from shardformer.cli.base_model import convert_teacher  # not imported without a teacher

        config = convert_teacher(config)
    return config


def names_base(arguments: list[str]) -> bool:
    """Returns whether the arguments are [PRESET] base=FOLDER key=value ..."""
    settings = arguments[1:] if arguments and arguments[0] in presets.PRESETS else arguments
    return all("=" in word for word in settings) and any(word.startswith("base=") for word in settings)


def names_step(arguments: list[str]) -> bool:
    """Returns whether the arguments name a checkpoint of another run to continue."""
    return any(word.startswith("base=") and split_checkpoint(word)[1] for word in arguments)


def _parse_resume(before: list[str], arguments: list[str]) -> tuple:
    """Returns the folder and the changed keys of '[key=value ...] --resume RUN [key=value ...]'."""
    first, *after = arguments
    if first != "--resume":  # --resume=RUN
        after = [first.removeprefix("--resume="), *after]
    if not after or not after[0] or not storage.is_path(after[0]):
        raise UsageError("train --resume takes the folder of a run")
    if before and before[0] in presets.PRESETS:
        raise UsageError(f"train takes a preset or --resume RUN, not both; got {' '.join([*before, *arguments])}")
    return run_folder(after[0]), parse_keys(before + after[1:])


def say_how_to_resume(run: Run) -> None:
    """Prints the command that continues a stopped run."""
    say(f"resume with: python -m shardformer train --resume {run.resume_arguments}")


def finish(trained: Trained, ending: "Ending", stop: StopSignal) -> None:
    """Evaluates the best checkpoint on all held-out data, and prints a sample of it.

    A stop ends it; `train --resume` repeats it.
    """
    run, plan = trained.run, "ending the final evaluation; the run is saved"
    with stop.printed_by(print_line, plan=plan):
        try:
            if splits := [*trained.evaluator.corpus.held_out]:
                say(f"evaluating the best checkpoint on all of {' and '.join(splits)}")
            losses = trained.evaluate(stop.is_requested)
            step, params = run.restore_params(ending.model, trained.best.step)
            table = format_losses(losses, run.config) if losses else "there is no validation data to evaluate it on"
            say(f"\nbest checkpoint: step {step}, on {run.config.data.source}\n{table}")
            with contextlib.suppress(SampleStopped):
                say_text(ending.write(params, stop))
        except EvaluationStopped:
            say_how_to_resume(run)


class Ending(HostFeature):
    """The end of a run that prints no more than its losses."""

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, *_: object) -> None:
        self.model = evaluator.trainer.model

    def write(self, params, stop: StopSignal) -> str:
        """Returns the text that follows the losses."""
        return ""

    def close(self) -> None:
        """Waits for the end of a thread, if there is one."""


class TaskReport(Ending):
    """The lines that a user's task prints of its best parameters."""

    def write(self, params, stop: StopSignal) -> str:
        """Returns the lines, of parameters on the host."""
        return "\n".join(self.model.task.report(processes.gather_arrays(params)))


def choose_ending(config: Config) -> Ending:
    """Returns what a run prints of its best parameters."""
    if config.start.task:
        return TaskReport(config)
    return FinalSample(config) if config.objective.has_vocabulary else Ending(config)


class FinalSample(Ending):
    """A text of the run without a prompt, whose programs a thread compiles during the last steps."""

    _early: EarlyWork | None = None

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, *_: object) -> None:
        c = run.config
        self._run, self.model = run, make_sampling_model(run, evaluator)
        self.generator = Generator(self.model)
        self._sampling = Sampling(tokens=400, seed=c.training.seed, stride=max(c.model.seq // 4, 1))
        if int(state.step) >= c.training.steps:
            self.after_step({"step": c.training.steps})  # no step follows

    def after_step(self, row: dict, *_: object) -> dict:
        remaining = self._run.config.training.steps - row["step"]
        if remaining < LAST_STEPS and not self._early and programs.saves_time():
            self._early = EarlyWork(self.compile)
        return row

    def write(self, params, stop: StopSignal) -> str:
        """Returns the text. Raises SampleStopped at the first tokens after a stop."""
        self.close()

        def look_for_stop(*_) -> None:
            if stop.is_requested():
                raise SampleStopped

        text = sample_text(self._run, self.generator, params, self._sampling, look_for_stop).strip()
        return f"\nit writes:\n{text}\n"

    def compile(self) -> None:
        """Compiles the programs that `write` runs first."""
        run = self._run
        prompt = run.vocabulary.first_ids().tolist()
        self.generator.compile(run.abstract_params(self.generator.model), prompt, self._sampling, len(run.vocabulary))

    def close(self) -> None:
        if self._early:
            with goodput.CLOCK.spending("compile"):
                self._early.wait()
