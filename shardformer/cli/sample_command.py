"""`sample`: text from a run's best checkpoint."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence

import jax

from shardformer.cli.words import parse_run_and_options, say
from shardformer.config import parsing
from shardformer.config.keys import key
from shardformer.distributed import processes
from shardformer.errors import UsageError
from shardformer.hardware import compilation_cache
from shardformer.inference import Generator, Sampling, Stops
from shardformer.inference.generator import Watch, ignore
from shardformer.model import Model
from shardformer.parallel import mesh
from shardformer.training.run_folder import Run

BATCH = 16  # samples that are computed together
RULE = "-" * 60  # between two samples


@dataclasses.dataclass(frozen=True)
class WeightsOptions:
    """The checkpoint and the devices."""

    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "use the averaged weights of a run trained with ema")
    mesh: str = key("auto", "devices as DPxMP; auto is one device; a model too large for one takes 1x8, for instance")


def check_batch(batch: int) -> None:
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")


@dataclasses.dataclass(frozen=True)
class SampleOptions(WeightsOptions, Sampling):
    """The text and the checkpoint."""

    prompt: str = key("\n", "the text to continue")

    def __post_init__(self):
        super().__post_init__()
        if not self.prompt:
            raise UsageError("prompt is empty: give at least one character")


@processes.ending_all_on_failure()
def sample(words: list[str]) -> None:
    """Prints text from a run's best checkpoint; a terminal shows a single text as it is generated."""
    folder, sampling = parse_run_and_options(words, SampleOptions)
    run = Run.open(folder)
    if sampling.prompt == SampleOptions.prompt:
        prompt = run.vocabulary.first_ids().tolist()
    else:
        prompt = run.vocabulary.encode(sampling.prompt, source="prompt").tolist()
    model, params = load_model(run, sampling)
    if sampling.samples == 1 and sys.stdout.isatty() and jax.process_index() == 0:
        sample_text(run, model, params, sampling, prompt, Terminal(run, prompt, sampling))
        print()
    else:
        for i, text in enumerate(sample_texts(run, model, params, sampling, prompt)):
            say(f"{RULE}\n{text}" if i else text)


def load_model(run: Run, options: WeightsOptions) -> tuple[Model, dict]:
    """Returns the model of a run on the mesh of these options, and its parameters."""
    shape = "1x1" if options.mesh == "auto" else options.mesh
    dp, _, pp = parsing.parse_mesh(shape)
    changes = {"mesh": shape, "batch": dp * pp, "accum": pp, "sequence_parallel": False}
    settings = mesh.start(run.config.without_gradients().replace(**changes).without_stages())
    compilation_cache.keep_compiled_programs(settings)
    model = Model(settings, mesh.make(settings))
    _, params = run.restore_params(model, options.step, options.ema)
    return model, params


class Terminal:
    """A text that is printed as its tokens come, up to its last complete character."""

    def __init__(self, run: Run, prompt, sampling: Sampling):
        self._cut = Stops(run.vocabulary, at_end=not sampling.ignore_eos).cut
        self._ids, self._shown = list(map(int, prompt)), 0
        self(0, [])

    def __call__(self, row: int, ids: list[int]) -> None:
        self._ids += ids
        text = self._cut(self._ids).rstrip("\N{REPLACEMENT CHARACTER}")
        print(text[self._shown :], end="", flush=True)
        self._shown = max(self._shown, len(text))


def sample_text(
    run: Run, model: Model, params, sampling: Sampling, prompt: Sequence[int] | None = None, watch: Watch = ignore
) -> str:
    """Returns the samples of one prompt, separated by a line."""
    return f"\n{RULE}\n".join(sample_texts(run, model, params, sampling, prompt, watch))


def sample_texts(
    run: Run, model: Model, params, sampling: Sampling, prompt: Sequence[int] | None = None, watch: Watch = ignore
) -> Iterator[str]:
    """Yields the prompt with each of its samples, `BATCH` of which are computed together."""
    prompt = run.vocabulary.first_ids().tolist() if prompt is None else prompt
    stops = Stops(run.vocabulary, at_end=not sampling.ignore_eos)
    rows = Generator(model).stream(params, [prompt], sampling, len(run.vocabulary), stops, watch, BATCH)
    return (stops.cut([*prompt, *row.ids]) for row in rows)
