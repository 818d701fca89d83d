"""What each command does, from its words to its last line."""

import dataclasses
import json
import os
from pathlib import Path

import jax

from shardformer import config, data, mesh, specs
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.loop import Loop, StopSignal
from shardformer.model import Model
from shardformer.report import curves
from shardformer.report.progress import table
from shardformer.run import Best, Run
from shardformer.sample import Sampling, generate
from shardformer.train import Trainer


def train(words: list[str]) -> None:
    """A new run of a preset, or a run resumed."""
    if "--resume" in words:
        at = words.index("--resume")
        if not _is_folder_first(words[at + 1 :]):
            raise UsageError("train --resume takes the folder of a run")
        run = Run.open(Path(words[at + 1]), config.parse_overrides(words[:at] + words[at + 2 :]))
        corpus = data.load(run.config.data, say)
        run.check_corpus(corpus)
        run = run.on(corpus)
    else:
        settings = preset(words)
        corpus = data.load(settings.data, say)
        run = Run.create(settings, corpus)
        run.refuse_to_overwrite()
    with StopSignal() as stop:
        run = dataclasses.replace(run, config=mesh.start(run.config))
        mesh.check_same_everywhere("the text", run.fingerprint)
        trainer = Trainer(run.config, mesh.make(run.config))
        say(describe(run, trainer.model))
        state, best = run.restore(trainer)
        loop = Loop(run, trainer, corpus, first_step=int(state.step))
        run.write_documents()
        reached, best = loop.train(state, best, stop)
    if jax.process_index() == 0:
        say(f"curves: {curves.draw(run.out)}")
    if reached < run.config.steps:
        say(f"go on with: python -m shardformer train --resume {run.out}")
        return
    finish(run, loop, best)


def finish(run: Run, loop: Loop, best: Best) -> None:
    """The best checkpoint on all of validation and test, and what it writes."""
    model = loop.trainer.model
    step, params = run.restore_params(model, best.step)
    losses = evaluate_splits(loop, params, ("validation", "test"))
    sampling = Sampling(tokens=400, seed=run.config.seed, stride=max(run.config.seq // 4, 1))
    text = sample_text(run, model, params, sampling)
    if jax.process_index() == 0:
        (run.out / "final.json").write_text(json.dumps({"step": step} | losses, indent=2) + "\n")
    say(f"\nbest checkpoint: step {step}\n{loss_table(losses)}\n\nit writes:\n{text}")


def evaluate(words: list[str]) -> None:
    """The loss of a split under a checkpoint of a run."""
    folder, options = run_and_options(words, Evaluating)
    run = Run.open(folder)
    corpus = data.load(run.config.data, say)
    run.check_corpus(corpus)
    settings = mesh.start(run.config.replace(mesh=options.mesh))
    trainer = Trainer(settings, mesh.make(settings))
    step, params = run.restore_params(trainer.model, options.step)
    splits = ("validation", "test") if options.split == "all" else (options.split,)
    losses = evaluate_splits(Loop(run, trainer, corpus), params, splits)
    say(f"step {step}\n{loss_table(losses)}")


def sample(words: list[str]) -> None:
    """Text from a run's best checkpoint."""
    folder, sampling = run_and_options(words, Sampling)
    run = Run.open(folder)
    prompt = run.vocabulary.encode(sampling.prompt, source="prompt")
    shape = "1x1" if sampling.mesh == "auto" else sampling.mesh
    dp, _ = config.parse_mesh(shape)
    settings = mesh.start(run.config.replace(mesh=shape, batch=dp))  # every dp draws the same samples
    model = Model(settings, mesh.make(settings))
    _, params = run.restore_params(model, sampling.step)
    say(sample_text(run, model, params, sampling, prompt))


def import_data(words: list[str]) -> None:
    if len(words) != 2 or words[0] != "import":
        raise UsageError("data takes: import INPUT.TXT")
    say(f"tiny_shakespeare is prepared in {data.import_file(Path(words[1]))}")


def show(words: list[str]) -> None:
    """Every setting and every parameter's split, without a device."""
    settings = preset(words)
    settings = settings.replace(vocab=settings.vocab or 65)  # tiny_shakespeare's
    if settings.mesh == "auto":
        settings = settings.replace(mesh="1x1")
    mesh.use_cpu_devices(1)
    say(settings.to_json())
    say(specs.table(Model.abstract_parameters(settings), settings))


def bench(words: list[str]) -> None:
    from shardformer.report import bench

    bench.main(words)


COMMANDS = {
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "data": import_data,
    "show": show,
    "bench": bench,
}


@dataclasses.dataclass(frozen=True)
class Evaluating:
    """The options of `eval`."""

    split: str = "all"
    mesh: str = "auto"
    step: int = 0  # of the checkpoint; 0 means the best by validation

    def __post_init__(self):
        splits = ("train", "validation", "test", "all")
        if self.split not in splits:
            raise UsageError(f"split is one of {', '.join(splits)}; got {self.split!r}")


def preset(words: list[str]) -> Config:
    if not words:
        raise UsageError(f"name a preset: {', '.join(config.PRESETS)}")
    settings = config.preset(words[0])
    overrides = config.parse_overrides(words[1:])
    out = os.path.expanduser(overrides.get("out") or settings.out)  # not every shell does it after `out=`
    return settings.replace(**overrides | {"out": out})


def _is_folder_first(words: list[str]) -> bool:
    """A sweep's folder may be named lr=0.1; anything else with a = is an option."""
    return bool(words) and ("=" not in words[0] or Path(words[0]).is_dir())


def run_and_options(words: list[str], options: type):
    if not _is_folder_first(words):
        raise UsageError("name the folder of a run first")
    return Path(words[0]), options(**config.parse_overrides(words[1:], options))


def evaluate_splits(loop: Loop, params, splits) -> dict[str, dict]:
    """Each split's evaluation, and that of all of them together."""
    results = {split: loop.evaluate(split, params) for split in splits}
    if len(results) > 1:
        tokens = sum(result.tokens for result in results.values())
        mean = lambda name: sum(getattr(r, name) * r.tokens for r in results.values()) / tokens
        results[" + ".join(splits)] = type(results[splits[0]])(mean("loss"), mean("accuracy"), tokens)
    return {name: result._asdict() for name, result in results.items()}


def loss_table(losses: dict[str, dict]) -> str:
    rows = [[name, f"{r['loss']:.4f}", f"{r['accuracy']:.1%}", f"{r['tokens']:,}"] for name, r in losses.items()]
    return table(rows, ["split", "nats/token", "accuracy", "tokens"])


def sample_text(run: Run, model: Model, params, sampling: Sampling, prompt=None) -> str:
    if prompt is None:
        prompt = run.vocabulary.encode("\n" if "\n" in run.vocabulary.characters else run.vocabulary.characters[0])
    rows = generate(model, params, prompt, sampling, known=len(run.vocabulary))
    return ("\n" + "-" * 60 + "\n").join(run.vocabulary.decode(row) for row in rows)


def describe(run: Run, model: Model) -> str:
    c = run.config
    return (
        f"{run.out}: {specs.count(model.shapes) / 1e6:.2f}M parameters, {c.layers} layers, d_model {c.d_model}, "
        f"{c.heads} heads; {c.data}, {len(run.vocabulary)} characters; "
        f"mesh {c.mesh} (dp x mp) of {jax.devices()[0].device_kind} devices, {c.dtype}"
    )


def say(text: str) -> None:
    """Only one process of a pod talks."""
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        print(text, flush=True)
