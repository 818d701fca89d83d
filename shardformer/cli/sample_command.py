"""`sample`: text from a run's best checkpoint."""

import dataclasses

from shardformer import mesh, parsing
from shardformer.cli.words import run_and_options, say
from shardformer.errors import UsageError
from shardformer.model import Model
from shardformer.parsing import key
from shardformer.sample import Generator, Sampling
from shardformer.training.run_folder import Run


@dataclasses.dataclass(frozen=True)
class SampleOptions(Sampling):
    """The text and the checkpoint."""

    prompt: str = key("\n", "the text to continue")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "use the average of the weights, of a run that was trained with ema")
    mesh: str = key("auto", "devices as DPxMP; auto is one device; a model that does not fit there takes 1x8, say")

    def __post_init__(self):
        super().__post_init__()
        if not self.prompt:
            raise UsageError("prompt is empty: give at least one character")
        if self.step < 0:
            raise UsageError(f"step must not be negative, got {self.step}")


def sample(words: list[str]) -> None:
    """Text from a run's best checkpoint."""
    folder, sampling = run_and_options(words, SampleOptions)
    run = Run.open(folder)
    prompt = run.vocabulary.encode(sampling.prompt, source="prompt")
    shape = "1x1" if sampling.mesh == "auto" else sampling.mesh
    dp, _ = parsing.parse_mesh(shape)
    # Every dp draws the same samples.
    settings = mesh.start(run.config.replace(mesh=shape, batch=dp, accum=1, grad_metrics=False))
    model = Model(settings, mesh.make(settings))
    _, params = run.restore_params(model, sampling.step, sampling.ema)
    say(sample_text(run, model, params, sampling, prompt))


def sample_text(run: Run, model: Model, params, sampling: Sampling, prompt=None) -> str:
    if prompt is None:
        prompt = run.vocabulary.first_ids()
    rows = Generator(model).generate(params, prompt, sampling, len(run.vocabulary))
    return ("\n" + "-" * 60 + "\n").join(run.vocabulary.decode(row) for row in rows)
