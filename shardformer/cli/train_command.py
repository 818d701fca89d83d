"""`train`: a new run of a preset, or a run resumed."""

import contextlib
import dataclasses
import json

import jax

from shardformer import config, data, lora, mesh, optim, parsing, presets, processes
from shardformer.cli.eval_command import loss_table
from shardformer.cli.sample_command import sample_text
from shardformer.cli.words import names_a_folder, parameter_count, preset, run_folder, say
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.logs import curves
from shardformer.model import Model
from shardformer.sample import Sampling
from shardformer.training.evaluation import Evaluator
from shardformer.training.loop import Loop
from shardformer.training.run_folder import Best, Run
from shardformer.training.step import Trainer
from shardformer.training.stop_signal import StopSignal


def train(words: list[str]) -> None:
    """A new run of a preset, or a run resumed."""
    if "--resume" in words:
        at = words.index("--resume")
        if not names_a_folder(words[at + 1 :]):
            raise UsageError("train --resume takes the folder of a run")
        if words[:1] and words[0] in presets.PRESETS:
            raise UsageError(f"train takes a preset or --resume RUN, not both; got {' '.join(words)}")
        folder = run_folder(words[at + 1])
        run = Run.open(folder, parsing.overrides(words[:at] + words[at + 2 :], Config))
        changes = run.config.changes_of(config.read(folder))
        corpus = data.load(run.config.data, say)
        run.check_corpus(corpus)
        run = run.on(corpus)
    else:
        settings = preset(words)
        if settings.lora_rank and not settings.base:
            raise UsageError("lora_rank trains adapters beside the frozen weights of a trained run; name it: base=RUN")
        corpus = data.load(settings.data, say)
        run = Run.create(settings, corpus)
        run.refuse_to_overwrite()
        changes = None
    with StopSignal() as stop, contextlib.ExitStack() as stack:
        run = dataclasses.replace(run, config=mesh.start(run.config))
        stack.enter_context(processes.ending_all_on_failure())
        run.check_same_start()
        trainer = Trainer(run.config, mesh.make(run.config))
        stack.enter_context(run.locked())
        say(describe(run, trainer.model))
        if run.config.lr_rules:
            say(optim.rules.format_table(lora.select_learned(trainer.model.shapes, run.config), run.config))
        state, best = run.restore(trainer, say)
        if state.step > run.config.steps:
            raise UsageError(f"{run.out} is at step {state.step} already, got steps={run.config.steps}; give more")
        if changes is not None:
            say(f"resuming from step {state.step}" + (f" with {changes}" if changes else ""))
        evaluator = Evaluator(trainer, corpus, run.vocabulary)
        loop = Loop(run, trainer, evaluator, first_step=int(state.step))
        shown, every = evaluator.batches("validation", run.config.eval_batches), evaluator.batches("validation")
        if shown < every:
            say(f"val loss: on {shown} of validation's {every} batches (eval_batches); at the end on all of them")
        run.write_documents()
        try:
            reached, best = loop.train(state, best, stop)
        finally:
            if jax.process_index() == 0 and run.has_records():
                with contextlib.suppress(OSError):  # a full disk has been told of in better words
                    say(f"curves: {curves.draw(run.out)}")
    if reached < run.config.steps:
        say(f"go on with: python -m shardformer train --resume {run.out}")
        return
    finish(run, evaluator, best)


def finish(run: Run, evaluator: Evaluator, best: Best) -> None:
    """The best checkpoint on all of validation and test, and what it writes."""
    model = evaluator.trainer.model
    say("evaluating the best checkpoint on all of validation and test")
    step, params = run.restore_params(model, best.step)
    losses = evaluator.together(("validation", "test"), params)
    sampling = Sampling(tokens=400, seed=run.config.seed, stride=max(run.config.seq // 4, 1))
    text = sample_text(run, model, params, sampling)
    if jax.process_index() == 0:
        report = {"step": step} | {split: result._asdict() for split, result in losses.items()}
        (run.out / "final.json").write_text(json.dumps(report, indent=2) + "\n")
    say(f"\nbest checkpoint: step {step}, on {run.config.data}\n{loss_table(losses)}\n\nit writes:\n{text.strip()}")


def describe(run: Run, model: Model) -> str:
    c = run.config
    parameters = parameter_count(model.shapes, lora.select_learned(model.shapes, c))
    return (
        f"{run.out}: {parameters}, {c.layers} layers, d_model {c.d_model}, "
        f"{c.heads} heads; {c.data}, {len(run.vocabulary)} characters; "
        f"mesh {c.mesh} (dp x mp) of {jax.devices()[0].device_kind} devices, {c.dtype}"
    )
