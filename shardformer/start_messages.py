"""The lines that a start prints: the model, its data and devices, and the changes of a resume or a branch."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.adapters.adapter_keys import select_trainable
from shardformer.analysis.memory import summarize_bytes
from shardformer.config import Config, parsing
from shardformer.data import Data
from shardformer.devices import programs
from shardformer.devices.chips import find_chip
from shardformer.layout import specs
from shardformer.model import flops
from shardformer.model.task_on_mesh import TaskOnMesh, choose_task
from shardformer.optim.schedule import decay_end, warmup_steps, wsd_decay_steps
from shardformer.tables import format_count
from shardformer.training.evaluation import Evaluator
from shardformer.training.run_folder import Run


def describe_start(run: Run, corpus: Data, model: TaskOnMesh) -> Iterator[str]:
    """Yields the lines of a run before its state is restored."""
    yield describe(run)
    yield from corpus.describe_rows(run.config)
    if run.config.optimizer.lr_rules:
        from shardformer.analysis import parameter_tables  # not imported without rules

        yield parameter_tables.format_rules(select_trainable(model.shapes, run.config), run.config)


def describe_position(run: Run, previous: Config | None, is_new: bool, step: int, model: TaskOnMesh) -> Iterator[str]:
    """Yields the changes of a branch, which is new, or of a resume, and what follows from the position of the run."""
    if previous and is_new:
        yield describe_branch(previous, run.config, step)
    elif previous:
        yield describe_resume(previous, run.config, step, model.sharding(P()))
    if run.config.stored.quantize_aware != "none":
        from shardformer.quantized import rounded_weights  # not imported without quantize_aware

        yield rounded_weights.describe_rounding(previous, run.config)
    yield from _describe_unnamed(run, step)


def describe_evaluated_share(evaluator: Evaluator) -> Iterator[str]:
    """Yields a line if the evaluations during training use a part of validation only."""
    if evaluator.own_loss or not evaluator.validates:
        return
    used = evaluator.count_batches("validation", evaluator.trainer.config.run.eval_batches or 0)
    total = evaluator.count_batches("validation")
    if used < total:
        yield f"val loss: on {used} of the {total} batches of validation (eval_batches); at the end on all of them"


def describe(run: Run) -> str:
    """Formats the model, the data, the mesh and the bytes of each device."""
    c = run.config
    task = choose_task(c)
    shapes = task.abstract_parameters(c)  # floats, also where the model stores codes
    parameters = parameter_count(shapes, select_trainable(shapes, c))
    units = f", {len(run.vocabulary)} {run.vocabulary.units}" if c.objective.reads_tokens else ""
    kind = jax.devices()[0].device_kind
    chip = find_chip(kind)
    processes_noted = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return (
        f"{run.out}: {parameters}{task.describe_sizes(c)}; {c.data.source}{units}; "
        f"mesh {c.parallel.mesh} ({c.parallel.mesh_axes}) of {kind} devices{processes_noted}, {c.parallel.dtype}\n"
        f"on each device: {summarize_bytes(c)}, besides activations"
        + (f"\n{flops.describe_peak(c, chip)}" if chip else "")
        + _describe_short_warmup(c)
        + describe_short_decay(c)
    )


def parameter_count(parameters: dict, trainable: dict) -> str:
    """Formats the number of parameters and, if fewer are trainable, the number of these."""
    every, some = specs.count_parameters(parameters), specs.count_parameters(trainable)
    adapters = f" ({some:,} trainable: {some / every:.1%})" if some < every else ""
    return f"{every / 1e6:,.2f}M parameters{adapters}"


def _describe_short_warmup(c: Config) -> str:
    """Formats a line if the decay or the run is too short for the full warm-up; otherwise returns an empty text."""
    if c.optimizer.searches_rate:
        return ""
    steps, last = warmup_steps(c), c.training.steps
    if steps > last:
        return (
            f"\nthe run ends in its warm-up, at a rate of {c.optimizer.lr * last / steps:.2e}: warmup={steps} exceeds "
            f"steps={last}; for a short run, give warmup={max(last // 10, 1)}"
        )
    if steps == c.optimizer.warmup:
        return ""
    return (
        f"\nwarmup={c.optimizer.warmup} is shortened to {format_count(steps, 'step')}, as the rate is lr_min after "
        f"{decay_end(c)}; for a short run, give warmup={max(decay_end(c) // 10, 1)}"
    )


def describe_short_decay(c: Config) -> str:
    """Formats a line if decay= exceeds the steps after the warm-up; otherwise returns an empty text."""
    if (
        c.optimizer.searches_rate
        or not c.optimizer.decays_late
        or not c.optimizer.decay
        or (steps := wsd_decay_steps(c)) == c.optimizer.decay
    ):
        return ""
    shortened = f"is shortened to {format_count(steps, 'step')}"
    return f"\ndecay={c.optimizer.decay} {shortened} between the warm-up and step {decay_end(c)}"


def describe_resume(previous: Config, current: Config, step: int, replicated: NamedSharding | None = None) -> str:
    """Formats the step of a resumed run, its changed keys and the effect on the learning rate.

    replicated: the sharding of the rates over the run's devices, if multiple processes compute them.
    """
    changes, traced = current.describe_changes(previous), parsing.parse_steps_range("profile", current.start.profile)
    lines = [f"resuming from step {step}" + (f" with {changes}" if changes else "")]
    if traced and traced[1] <= step:  # no error: a scheduler repeats the arguments of a preempted run
        lines.append(f"profile={current.start.profile} traces nothing: the first step now is {step + 1}")
    if current.optimizer.searches_rate or not changes:  # a line search finds the rate of lbfgs
        return "\n".join(lines)
    old, new = (optim.learning_rate(c) for c in (previous, current))

    def compute_rates(step, last):
        return jnp.stack([old(step), new(step), new(last)])

    # One program, which is cached. Without jit, a dozen small ones would be compiled in every start.
    rates = programs.jit(compute_rates, out_shardings=replicated)(np.int32(step), np.int32(current.training.steps - 1))
    before, now, last = map(float, np.asarray(rates))
    if step < current.training.steps and not math.isclose(before, now, rel_tol=0.01, abs_tol=1e-12):
        line = f"learning rate: {now:.2e} at step {step + 1} ({before:.2e} without the change), "
        line += f"{last:.2e} at the last step"
        moved = current.training.steps != previous.training.steps and not current.optimizer.decay_steps
        if current.optimizer.falls and moved:
            line += f"; the decay ends at the last step: decay_steps={previous.training.steps} keeps the previous rates"
        lines.append(line)
    return "\n".join(lines)


def _describe_unnamed(run: Run, step: int) -> Iterator[str]:
    """Yields a line for each record of the run that a resume ends, as its key is not given again."""
    start = run.config.start
    for record, name, given in (
        ("scores", "eval_tasks", start.eval_tasks),
        ("texts", "eval_prompts", start.eval_prompts),
    ):
        if step and not given and (run.records / f"{record}.jsonl").exists():
            yield f"{record}.jsonl is not continued: {name} is never stored in a run; give {name}= again"


def describe_branch(before: Config, config: Config, step: int) -> str:
    """Formats the source of a branch, its changed keys and its learning rate from `step` on."""
    changes = config.replace(base=before.training.base).describe_changes(before)
    lines = [
        f"branching from step {step} of {config.training.base_run}" + (f" with {changes}" if changes else ""),
        "the parameters, the optimizer's state and the position in the data continue from that step",
    ]
    if not config.optimizer.searches_rate:
        lines.append(_describe_rate(before, config, step))
    return "\n".join(lines)


def _describe_rate(before: Config, config: Config, step: int) -> str:
    warmup = warmup_steps(config)
    rates = np.asarray(optim.learning_rate(config)(np.arange(step, config.training.steps)))
    base_rate = float(optim.learning_rate(before)(np.int32(step)))
    line = f"learning rate: {rates[0]:.2e} at step {step + 1} ({base_rate:.2e} in the base), "
    line += f"{rates[-1]:.2e} at the last step; "
    line += f"the warm-up continues to step {warmup}" if step < warmup else "no warm-up is repeated"
    if falling := np.flatnonzero(np.diff(rates) < 0).tolist():
        line += f"; the rate falls after step {step + 1 + falling[0]}"
    return line
