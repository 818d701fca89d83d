"""`train`: starts a new run or resumes one."""

import contextlib
import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint, optim, programs, storage
from shardformer.analysis import parameter_tables
from shardformer.analysis.memory import predict_needed, summarize_bytes
from shardformer.checkpoint import Lock
from shardformer.cli.base_model import names_base, open_vocabulary_of_base, parse_base
from shardformer.cli.branch import describe_branch, names_step, parse_branch
from shardformer.cli.eval_command import loss_table
from shardformer.cli.generate_command import read_prompts
from shardformer.cli.loading import load_corpus
from shardformer.cli.sample_command import sample_text
from shardformer.cli.words import parameter_count, parse_keys, parse_preset, run_folder, say
from shardformer.config import Config, check_given, check_zero, parsing, presets
from shardformer.data import Corpus
from shardformer.data.corpus import choose_row_layout
from shardformer.distributed import processes
from shardformer.errors import UsageError
from shardformer.files import replacing
from shardformer.hardware.chips import find_chip
from shardformer.inference import Sampling
from shardformer.logs import command_start, curves, goodput, streams, trackers
from shardformer.model import Model, flops, lora
from shardformer.monitor import Monitor
from shardformer.optim.schedule import warmup_steps
from shardformer.parallel import mesh
from shardformer.run import Best, Run
from shardformer.run.stop_signal import StopSignal, print_line
from shardformer.storage import BucketPath
from shardformer.training import loop
from shardformer.training.evaluation import EvaluationStopped, Evaluator
from shardformer.training.step import Trainer


class SampleStopped(Exception):
    """A stop was requested before the last token of the sample."""


def train(words: list[str]) -> None:
    """Trains a new run of a preset, or resumes a run."""
    goodput.CLOCK.restart(command_start.take_start())
    with streams.lasting_output(), goodput.CLOCK.noting_compilation():
        opened = _open_run(words)
        check_zero(opened.run.config)
        with StopSignal() as stop:
            run, evaluator, best = _train(opened, stop)
            if stop.is_obeyed:
                say_how_to_resume(run)
            else:
                with goodput.CLOCK.spending("evaluation"):
                    finish(run, evaluator, best, stop)
            say(goodput.CLOCK.finish())


class OpenedRun(NamedTuple):
    """A run to train, and the configuration of the checkpoint that it continues."""

    run: Run
    corpus: Corpus
    previous: Config | None  # None for a run from step 0
    is_new: bool


def _train(opened: OpenedRun, stop: StopSignal) -> tuple[Run, Evaluator, Best]:
    """Trains to the last step or until a stop; returns the run with its mesh, its evaluator and the best checkpoint."""
    run, corpus, previous, is_new = opened
    with contextlib.ExitStack() as stack:
        run = dataclasses.replace(run, config=mesh.start(run.config, predict_needed, say, previous))
        check_zero(run.config)  # again, as mesh=auto has a shape now
        programs.keep_compiled_programs(run.config, processes.gather_texts)
        stack.enter_context(processes.ending_all_on_failure())
        run.check_same_start()
        trainer = Trainer(run.config, mesh.make(run.config))
        lock = stack.enter_context(run.locked())
        if is_new:  # again: another run may have begun and ended there while this one waited
            processes.run_on_first_process(run.refuse_to_overwrite)
        say(describe(run, trainer.model))
        for line in corpus.describe_chat(choose_row_layout(run.config)):
            say(line)
        if run.config.lr_rules:
            say(parameter_tables.format_rules(lora.select_learned(trainer.model.shapes, run.config), run.config))
        state, best = run.restore(trainer, say)
        if int(state.step) > run.config.steps:
            raise UsageError(f"{run.out} is at step {state.step} already, got steps={run.config.steps}; give more")
        if previous:
            changed = (previous, run.config, int(state.step))
            say(describe_branch(*changed) if is_new else describe_resume(*changed, trainer.model.sharding(P())))
        evaluator = Evaluator(trainer, corpus, make_monitor(run, int(state.step), stop))
        say_evaluated_share(evaluator, run.config)
        batches = evaluator.corpus.train_batches(run.config, int(state.step), trainer.local_rows)
        stack.callback(batches.close)
        run.write_documents()
        try:
            best = loop.train(run, evaluator, batches, state, best, stop, lock)
        finally:
            with goodput.CLOCK.spending("evaluation"):
                draw_curves(run, lock)
        return run, evaluator, best


def _open_run(words: list[str]) -> OpenedRun:
    resumed = next((at for at, word in enumerate(words) if word.partition("=")[0] == "--resume"), None)
    if resumed is None:
        return _branch_run(words) if names_step(words) else OpenedRun(*_create_run(words), None, is_new=True)
    before, (first, *after) = words[:resumed], words[resumed:]
    if first != "--resume":  # --resume=RUN
        after = [first.removeprefix("--resume="), *after]
    if not after or not after[0] or not storage.is_place(after[0]):
        raise UsageError("train --resume takes the folder of a run")
    if before and before[0] in presets.PRESETS:
        raise UsageError(f"train takes a preset or --resume RUN, not both; got {' '.join(words)}")
    return OpenedRun(*_reopen_run(run_folder(after[0]), parse_keys(before + after[1:])), is_new=False)


def _create_run(words: list[str]) -> tuple[Run, Corpus]:
    settings = parse_base(words) if names_base(words) else parse_preset(words)
    if settings.lora_rank and not settings.base:
        raise UsageError("lora_rank trains adapters beside the frozen weights of a trained run; name it: base=RUN")
    trackers.check_trackers(settings)
    corpus = load_corpus(settings, open_vocabulary_of_base(settings) if settings.base else None)
    run = Run.create(settings, corpus)
    run.refuse_to_overwrite()
    return run, corpus


def make_monitor(run: Run, first_step: int, stop: StopSignal) -> Monitor | None:
    """Returns the scores and texts that the run makes while it trains; None if it makes none."""
    c = run.config
    if not (c.eval_tasks or c.eval_prompts):
        return None
    return Monitor(run, read_prompts(c.eval_prompts) if c.eval_prompts else [], first_step, stop.is_requested)


def _branch_run(words: list[str]) -> OpenedRun:
    settings, previous = parse_branch(words)
    source = Run.open(settings.base)
    run = dataclasses.replace(source, config=settings)
    run.refuse_to_overwrite()
    trackers.check_trackers(settings)
    corpus = load_corpus(settings, source.vocabulary, began_with=source.fingerprint, resumes=True)
    source.check_corpus(corpus)
    return OpenedRun(run.with_corpus(corpus), corpus, previous, is_new=True)


def _reopen_run(folder: Path | BucketPath, overrides: dict) -> tuple[Run, Corpus, Config]:
    run = Run.open(folder, overrides)
    previous = checkpoint.read_config(run.stored)
    check_given(run.config, {key: value for key, value in overrides.items() if value != getattr(previous, key)})
    trackers.check_trackers(run.config)
    corpus = load_corpus(run.config, run.vocabulary, began_with=run.fingerprint, resumes=True)
    run.check_corpus(corpus)
    run = run.with_corpus(corpus)
    unmoved = (run.config.data, run.config.validation) == (previous.data, previous.validation)
    if unmoved and run.config.text != previous.text:  # the corpus is the same, so the field was not read
        raise UsageError(
            f"text={run.config.text} does nothing: {run.config.data} is the same with text={previous.text}; "
            "leave it out"
        )
    return run, corpus, previous


def say_evaluated_share(evaluator: Evaluator, config: Config) -> None:
    """Prints a line if the evaluations during training use a part of validation only."""
    used, total = evaluator.count_batches("validation", config.eval_batches or 0), evaluator.count_batches("validation")
    if used < total:
        say(f"val loss: on {used} of the {total} batches of validation (eval_batches); at the end on all of them")


def describe_resume(previous: Config, current: Config, step: int, replicated: NamedSharding | None = None) -> str:
    """Formats the step of a resumed run, its changed keys and the effect on the learning rate.

    replicated: the sharding of the rates over the run's devices, if several processes compute them.
    """
    changes, traced = current.describe_changes(previous), parsing.parse_steps_range("profile", current.profile)
    lines = [f"resuming from step {step}" + (f" with {changes}" if changes else "")]
    if traced and traced[1] <= step:  # no error: a scheduler repeats the arguments of a preempted run
        lines.append(f"profile={current.profile} traces nothing: the first step now is {step + 1}")
    if current.optimizer == "lbfgs" or not changes:  # a line search finds the rate of lbfgs
        return "\n".join(lines)
    old, new = (optim.learning_rate(c) for c in (previous, current))

    def compute_rates(step, last):
        return jnp.stack([old(step), new(step), new(last)])

    # One program, which is kept. Without jit, a dozen small ones would be compiled in every start.
    rates = programs.jit(compute_rates, out_shardings=replicated)(np.int32(step), np.int32(current.steps - 1))
    before, now, last = map(float, np.asarray(rates))
    if step < current.steps and not math.isclose(before, now, rel_tol=0.01, abs_tol=1e-12):
        line = f"learning rate: {now:.2e} at step {step + 1} ({before:.2e} without the change), "
        line += f"{last:.2e} at the last step"
        falls = current.schedule != "constant"
        if falls and current.steps != previous.steps and not current.decay_steps:
            line += f"; the decay ends at the last step: decay_steps={previous.steps} keeps the previous rates"
        lines.append(line)
    return "\n".join(lines)


def draw_curves(run: Run, lock: Lock | None) -> None:
    """Draws curves.png; a failure is printed and does not fail the run."""
    if lock and (run.records / "metrics.csv").exists():
        try:
            say(f"curves: {curves.draw_curves(run.records)}")
            lock.check_still_held()
            storage.upload_records(run.out)
        except Exception as error:
            say(f"curves.png was not drawn: {error}")


def say_how_to_resume(run: Run) -> None:
    """Prints the command that continues a stopped run."""
    say(f"resume with: python -m shardformer train --resume {shlex.quote(str(run.out))}")


def finish(run: Run, evaluator: Evaluator, best: Best, stop: StopSignal) -> None:
    """Evaluates the best checkpoint on all of validation and test, and prints a sample of it.

    A stop ends it; `train --resume` does it again.
    """
    with stop.shown_by(print_line, plan="ending the final evaluation; the run is saved"):
        try:
            _finish(run, evaluator, best, stop)
        except EvaluationStopped:
            say_how_to_resume(run)


def _finish(run: Run, evaluator: Evaluator, best: Best, stop: StopSignal) -> None:
    model = evaluator.trainer.model
    say("evaluating the best checkpoint on all of validation and test")
    step, params = run.restore_params(model, best.step)
    losses = evaluator.evaluate_splits(evaluator.corpus.held_out, params, stop.is_requested)
    if jax.process_index() == 0:
        report = {"step": step} | {split: result.to_record() for split, result in losses.items()}
        with replacing(run.records / "final.json") as temporary:
            temporary.write_text(json.dumps(report, indent=2) + "\n")
        storage.upload_records(run.out)
    if run.config.pp > 1:
        settings = run.config.without_stages()
        model = Model(settings, mesh.make(settings))
        _, params = run.restore_params(model, best.step)
    say(f"\nbest checkpoint: step {step}, on {run.config.data}\n{loss_table(losses)}")
    with contextlib.suppress(SampleStopped):
        say(f"\nit writes:\n{write_sample(run, model, params, stop)}")


def write_sample(run: Run, model: Model, params, stop: StopSignal) -> str:
    """Returns a text of the run without a prompt. Raises SampleStopped at the first tokens after a stop."""

    def look_for_stop(*_) -> None:
        if stop.is_requested():
            raise SampleStopped

    sampling = Sampling(tokens=400, seed=run.config.seed, stride=max(run.config.seq // 4, 1))
    return sample_text(run, model, params, sampling, look_for_stop).strip()


def describe(run: Run, model: Model) -> str:
    """Formats the model, the data, the mesh and the bytes of each device."""
    c = run.config
    parameters = parameter_count(model.shapes, lora.select_learned(model.shapes, c))
    kind = jax.devices()[0].device_kind
    chip = find_chip(kind)
    processes_noted = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return (
        f"{run.out}: {parameters}, {c.layers} layers, d_model {c.d_model}, "
        f"{c.heads} heads; {c.data}, {len(run.vocabulary)} {run.vocabulary.units}; "
        f"mesh {c.mesh} ({c.mesh_axes}) of {kind} devices{processes_noted}, {c.dtype}\n"
        f"on each device: {summarize_bytes(c)}, besides activations"
        + (f"\n{flops.describe_peak(c, chip)}" if chip else "")
        + describe_short_warmup(c)
    )


def describe_short_warmup(c: Config) -> str:
    """Formats a line if the decay is too short for the full warm-up; otherwise returns an empty text."""
    if c.optimizer == "lbfgs" or (steps := warmup_steps(c)) == c.warmup:
        return ""
    return f"\nwarmup={c.warmup} is shortened to {steps} steps, as the rate is lr_min after {c.decay_steps or c.steps}"
