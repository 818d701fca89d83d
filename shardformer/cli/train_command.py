"""`train`: a new run of a preset, or a run resumed."""

import contextlib
import dataclasses
import json
import math
import shlex

import jax
import numpy as np

from shardformer import checkpoint, optim, storage
from shardformer.analysis.memory import predict_needed, summarize_bytes
from shardformer.checkpoint import Lock
from shardformer.cli.base_model import has_base_alone, open_vocabulary_of_base, parse_base
from shardformer.cli.eval_command import loss_table
from shardformer.cli.loading import load_corpus
from shardformer.cli.sample_command import sample_text
from shardformer.cli.words import check_needed, parameter_count, parse_keys, parse_preset, run_folder, say
from shardformer.config import Config, parsing, presets, validation
from shardformer.data import Corpus
from shardformer.distributed import processes
from shardformer.errors import UsageError
from shardformer.files import replacing
from shardformer.hardware import compilation_cache
from shardformer.hardware.chips import find_chip
from shardformer.inference.generator import Sampling
from shardformer.logs import curves, streams, trackers
from shardformer.model import Model, flops, lora
from shardformer.optim.schedule import warmup_steps
from shardformer.parallel import mesh
from shardformer.training.evaluation import Evaluator
from shardformer.training.loop import TrainingLoop
from shardformer.training.run_folder import Best, Run
from shardformer.training.step import Trainer
from shardformer.training.stop_signal import StopSignal


def train(words: list[str]) -> None:
    """A new run of a preset, or a run resumed."""
    with streams.lasting_output():
        run, corpus, previous = _open_run(words)
        validation.check_zero(run.config)
        if run.config.tracker:
            trackers.import_tracker(run.config.tracker)
        with StopSignal() as stop, contextlib.ExitStack() as stack:
            run = dataclasses.replace(run, config=mesh.start(run.config, predict_needed, say, previous))
            validation.check_zero(run.config)  # mesh=auto has a shape now
            compilation_cache.keep_compiled_programs(run.config)
            stack.enter_context(processes.ending_all_on_failure())
            run.check_same_start()
            trainer = Trainer(run.config, mesh.make(run.config))
            lock = stack.enter_context(run.locked())
            if not previous:  # another run may have begun there, and ended, while this one waited for its devices
                processes.run_on_first_process(run.refuse_to_overwrite)
            say(describe(run, trainer.model))
            if run.config.lr_rules:
                say(optim.rules.format_table(lora.select_learned(trainer.model.shapes, run.config), run.config))
            state, best = run.restore(trainer, say)
            if state.step > run.config.steps:
                raise UsageError(f"{run.out} is at step {state.step} already, got steps={run.config.steps}; give more")
            if previous:
                say(describe_resume(previous, run.config, int(state.step)))
            evaluator = Evaluator(trainer, corpus)
            shown = evaluator.count_batches("validation", run.config.eval_batches)
            if shown < (every := evaluator.count_batches("validation")):
                say(f"val loss: on {shown} of validation's {every} batches (eval_batches); at the end on all of them")
            loop = TrainingLoop(run, trainer, evaluator, int(state.step), lock)
            run.write_documents()
            try:
                reached, best = loop.train(state, best, stop)
            finally:
                draw_curves(run, lock)
        if reached < run.config.steps:
            say(f"go on with: python -m shardformer train --resume {shlex.quote(str(run.out))}")
        else:
            finish(run, evaluator, best)


def _open_run(words: list[str]) -> tuple[Run, Corpus, Config | None]:
    """The run with its text, and the configuration that a resumed run had before."""
    resumed = next((at for at, word in enumerate(words) if word.partition("=")[0] == "--resume"), None)
    if resumed is None:
        settings = parse_base(words) if has_base_alone(words) else parse_preset(words)
        if settings.lora_rank and not settings.base:
            raise UsageError("lora_rank trains adapters beside the frozen weights of a trained run; name it: base=RUN")
        corpus = load_corpus(settings, open_vocabulary_of_base(settings) if settings.base else None)
        run = Run.create(settings, corpus)
        run.refuse_to_overwrite()
        return run, corpus, None
    before, (first, *after) = words[:resumed], words[resumed:]
    if first != "--resume":  # --resume=RUN
        after = [first.removeprefix("--resume="), *after]
    if not after or not after[0] or not storage.is_place(after[0]):
        raise UsageError("train --resume takes the folder of a run")
    if before and before[0] in presets.PRESETS:
        raise UsageError(f"train takes a preset or --resume RUN, not both; got {' '.join(words)}")
    folder = run_folder(after[0])
    overrides = parse_keys(before + after[1:])
    run = Run.open(folder, overrides)
    previous = checkpoint.read_config(run.stored)
    check_needed(run.config, {key: value for key, value in overrides.items() if value != getattr(previous, key)})
    corpus = load_corpus(run.config, run.vocabulary)
    run.check_corpus(corpus)
    return run.with_corpus(corpus), corpus, previous


def describe_resume(previous: Config, current: Config, step: int) -> str:
    """Where a run continues, which of its keys have changed, and what that does to the learning rate."""
    changes, traced = current.describe_changes(previous), parsing.parse_steps_range("profile", current.profile)
    lines = [f"resuming from step {step}" + (f" with {changes}" if changes else "")]
    if traced and traced[1] <= step:  # not refused: a scheduler starts a run that it preempted with the same words
        lines.append(f"profile={current.profile} traces nothing: the first step now is {step + 1}")
    if current.optimizer == "lbfgs":  # it finds its own rate
        return "\n".join(lines)
    old, new = (optim.learning_rate(c) for c in (previous, current))
    rate = lambda schedule, at: float(schedule(np.int32(at)))
    if step < current.steps and not math.isclose(rate(old, step), rate(new, step), rel_tol=0.01, abs_tol=1e-12):
        line = (
            f"learning rate: {rate(new, step):.2e} at step {step + 1}, where it would have been {rate(old, step):.2e}; "
            f"{rate(new, current.steps - 1):.2e} at the last step"
        )
        if current.steps != previous.steps and not current.decay_steps:
            line += f" (the cosine ends at the last step; decay_steps={previous.steps} would leave it as it was)"
        lines.append(line)
    return "\n".join(lines)


def draw_curves(run: Run, lock: Lock | None) -> None:
    """A picture is for looking at: one that fails does not fail the run."""
    if lock and (run.records / "metrics.csv").exists():
        try:
            say(f"curves: {curves.draw_curves(run.records)}")
            lock.check_still_held()
            storage.upload_records(run.out)
        except Exception as error:
            say(f"curves.png was not drawn: {error}")


def finish(run: Run, evaluator: Evaluator, best: Best) -> None:
    """Evaluates the best checkpoint on all of validation and test, and prints a sample of it."""
    model = evaluator.trainer.model
    say("evaluating the best checkpoint on all of validation and test")
    step, params = run.restore_params(model, best.step)
    losses = evaluator.evaluate_splits(evaluator.corpus.held_out, params)
    if jax.process_index() == 0:
        report = {"step": step} | {split: result.to_record() for split, result in losses.items()}
        with replacing(run.records / "final.json") as temporary:
            temporary.write_text(json.dumps(report, indent=2) + "\n")
        storage.upload_records(run.out)
    sampling = Sampling(tokens=400, seed=run.config.seed, stride=max(run.config.seq // 4, 1))
    if run.config.pp > 1:
        settings = run.config.without_stages()
        model = Model(settings, mesh.make(settings))
        _, params = run.restore_params(model, best.step)
    text = sample_text(run, model, params, sampling)
    say(f"\nbest checkpoint: step {step}, on {run.config.data}\n{loss_table(losses)}\n\nit writes:\n{text.strip()}")


def describe(run: Run, model: Model) -> str:
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
    """A line where the decay is too short for the whole warm-up."""
    if c.optimizer == "lbfgs" or (steps := warmup_steps(c)) == c.warmup:
        return ""
    return f"\nwarmup={c.warmup} is cut to {steps} steps, as the rate is lr_min after {c.decay_steps or c.steps}"
