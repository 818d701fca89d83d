"""What each command does, from its words to its last line."""

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import jax

from shardformer import config, data, mesh, optim, parsing, presets, specs
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.evaluate import Evaluation, Evaluator
from shardformer.loop import Loop, StopSignal
from shardformer.model import Model
from shardformer.report import curves
from shardformer.run import Best, Run
from shardformer.sample import Sampling, generate
from shardformer.shards import lora
from shardformer.tables import table
from shardformer.train import Trainer


def train(words: list[str]) -> None:
    """A new run of a preset, or a run resumed."""
    if "--resume" in words:
        at = words.index("--resume")
        if not _is_folder_first(words[at + 1 :]):
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
        stack.enter_context(mesh.nobody_left_waiting())
        run.check_same_start()
        trainer = Trainer(run.config, mesh.make(run.config))
        stack.enter_context(run.locked())
        say(describe(run, trainer.model))
        if run.config.lr_rules:
            say(optim.rules.table(lora.learned(trainer.model.shapes, run.config), run.config))
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


def evaluate(words: list[str]) -> None:
    """The loss of a split under a checkpoint of a run."""
    folder, options = run_and_options(words, EvalOptions)
    run = Run.open(folder)
    corpus = data.load(run.config.data, say)
    run.check_corpus(corpus)
    settings = mesh.start(for_evaluation(run.config, options.mesh))
    trainer = Trainer(settings, mesh.make(settings))
    step, params = run.restore_params(trainer.model, options.step, options.ema)
    splits = ("validation", "test") if options.split == "all" else (options.split,)
    losses = Evaluator(trainer, corpus, run.vocabulary).together(splits, params)
    say(f"step {step}\n{loss_table(losses)}")


def for_evaluation(settings: Config, shape: str) -> Config:
    """As many rows at once as a microbatch of the training has; a mesh of one's choice may want a few more."""
    if shape != "auto":
        dp, _ = parsing.mesh(shape)
        rows = settings.batch // settings.accum
        settings = settings.replace(batch=-(-rows // dp) * dp, accum=1)
    return settings.replace(mesh=shape, grad_metrics=False)


def sample(words: list[str]) -> None:
    """Text from a run's best checkpoint."""
    folder, sampling = run_and_options(words, SampleOptions)
    run = Run.open(folder)
    prompt = run.vocabulary.encode(sampling.prompt, source="prompt")
    shape = "1x1" if sampling.mesh == "auto" else sampling.mesh
    dp, _ = parsing.mesh(shape)
    # Every dp draws the same samples.
    settings = mesh.start(run.config.replace(mesh=shape, batch=dp, accum=1, grad_metrics=False))
    model = Model(settings, mesh.make(settings))
    _, params = run.restore_params(model, sampling.step, sampling.ema)
    say(sample_text(run, model, params, sampling, prompt))


def import_data(words: list[str]) -> None:
    if len(words) != 2 or words[0] != "import":
        raise UsageError("data takes: import INPUT.TXT")
    say(f"tiny_shakespeare is prepared in {data.import_file(Path(words[1]))}")


def show(words: list[str]) -> None:
    """Every setting and every parameter's split, of a preset or a run, without a device."""
    if words and (Path(words[0]) / "config.json").is_file():
        settings = Run.open(Path(words[0]), parsing.overrides(words[1:], Config)).config
    else:
        settings = preset(words)
    settings = settings.replace(vocab=settings.vocab or 65)  # tiny_shakespeare's
    if settings.mesh == "auto":
        settings = settings.replace(mesh="1x1")
    mesh.use_cpu_devices(1)
    say(settings.to_json())
    parameters = Model.abstract_parameters(settings)
    say(specs.table(parameters, settings))
    learned = lora.learned(parameters, settings)
    optim.average.check(parameters, settings)
    if settings.lr_rules:
        say(optim.rules.table(learned, settings))
    say(parameter_count(parameters, learned))


def bench(words: list[str]) -> None:
    from shardformer.report import benches

    benches.main(words)


def convert(words: list[str]) -> None:
    """A checkpoint of GPT-J to a run, or a run to one of GPT-J."""
    from shardformer.convert import command

    command.main(words, say)


def legacy(words: list[str]) -> int:
    """An unedited script of xmap's time, or `--check`: what such code needs."""
    from shardformer.legacy import script

    return script.main(words)


COMMANDS = {
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "data": import_data,
    "show": show,
    "bench": bench,
    "convert": convert,
    "legacy": legacy,
}


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """The options of `eval`."""

    split: str = "all"
    mesh: str = "auto"
    step: int = 0  # of the checkpoint; 0 means the best by validation
    ema: bool = False  # the average of the weights, of a run that was trained with ema

    def __post_init__(self):
        splits = ("train", "validation", "test", "all")
        if self.split not in splits:
            raise UsageError(f"split is one of {', '.join(splits)}; got {self.split!r}")


@dataclasses.dataclass(frozen=True)
class SampleOptions(Sampling):
    """The options of `sample`."""

    prompt: str = "\n"
    step: int = 0  # of the checkpoint; 0 means the best by validation
    ema: bool = False  # the average of the weights, of a run that was trained with ema
    mesh: str = "auto"  # one device; a model that does not fit there takes mesh=1x8, say

    def __post_init__(self):
        super().__post_init__()
        if not self.prompt:
            raise UsageError("prompt is empty: give at least one character")
        if self.step < 0:
            raise UsageError(f"step must not be negative, got {self.step}")


NEEDS = {"lora_targets": "lora_rank", "lora_alpha": "lora_rank", "ema_names": "ema"}


def preset(words: list[str]) -> Config:
    if not words:
        raise UsageError(f"name a preset: {', '.join(presets.PRESETS)}")
    if (Path(words[0]) / "config.json").is_file():
        raise UsageError(f"{words[0]} is a run; go on with it by train --resume {words[0]}")
    settings = presets.preset(words[0])
    overrides = parsing.overrides(words[1:], Config)
    out = overrides.get("out") or settings.out
    paths = {"out": out, "base": overrides.get("base", "")}  # not every shell expands a ~ after =
    settings = settings.replace(**overrides | {key: os.path.expanduser(path) for key, path in paths.items()})
    for key, needed in NEEDS.items():
        if key in overrides and not getattr(settings, needed):
            raise UsageError(f"{key} does nothing without {needed}; give {needed} as well")
    return settings


def _is_folder_first(words: list[str]) -> bool:
    """A sweep's folder may be named lr=0.1; anything else with a = is an option."""
    return bool(words) and ("=" not in words[0] or Path(words[0]).is_dir())


def run_folder(word: str) -> Path:
    kept = Path("checkpoints", word)
    if not Path(word).exists() and kept.is_dir():
        raise UsageError(f"{word} is not a run; did you mean {kept}?")
    return Path(word)


def run_and_options(words: list[str], options: type):
    if not _is_folder_first(words):
        raise UsageError("name the folder of a run first")
    return run_folder(words[0]), options(**parsing.overrides(words[1:], options))


def loss_table(losses: dict[str, Evaluation]) -> str:
    rows = [[name, f"{it.loss:.4f}", f"{it.accuracy:.1%}", f"{it.tokens:,}"] for name, it in losses.items()]
    return table(rows, ["split", "nats/token", "accuracy", "tokens"])


def sample_text(run: Run, model: Model, params, sampling: Sampling, prompt=None) -> str:
    if prompt is None:
        prompt = run.vocabulary.encode("\n" if "\n" in run.vocabulary.characters else run.vocabulary.characters[0])
    rows = generate(model, params, prompt, sampling, known=len(run.vocabulary))
    return ("\n" + "-" * 60 + "\n").join(run.vocabulary.decode(row) for row in rows)


def describe(run: Run, model: Model) -> str:
    c = run.config
    parameters = parameter_count(model.shapes, lora.learned(model.shapes, c))
    return (
        f"{run.out}: {parameters}, {c.layers} layers, d_model {c.d_model}, "
        f"{c.heads} heads; {c.data}, {len(run.vocabulary)} characters; "
        f"mesh {c.mesh} (dp x mp) of {jax.devices()[0].device_kind} devices, {c.dtype}"
    )


def parameter_count(parameters, learned) -> str:
    every, some = specs.count(parameters), specs.count(learned)
    adapters = f" ({some:,} of them learn: {some / every:.1%})" if some < every else ""
    return f"{every / 1e6:,.2f}M parameters{adapters}"


def say(text: str) -> None:
    """Only one process of a pod talks."""
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        print(text, flush=True)
