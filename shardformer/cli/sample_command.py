"""`sample`: text from a run's best checkpoint."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from shardformer.cli.arguments import escape_for_terminal, parse_run_and_options, say_text
from shardformer.cli.text_options import SampleOptions, TextOptions, WeightsOptions
from shardformer.data import Vocabulary
from shardformer.data.stored_vocabulary import TOKENIZER_FOLDER
from shardformer.devices import processes, programs
from shardformer.errors import UsageError
from shardformer.inference import Generator, Sampling, Stops
from shardformer.inference.generator import Watch, ignore
from shardformer.inference.text_codec import TextCodec
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.training.run_folder import Run

if TYPE_CHECKING:
    from shardformer.inference.chat_codec import ChatCodec

BATCH = 16  # samples that are computed together
RULE = "-" * 60  # between two samples


@processes.ending_all_on_failure()
def sample(arguments: list[str]) -> None:
    """Prints text from a run's best checkpoint; a terminal shows a single text as it is generated."""
    folder, sampling = parse_run_and_options(arguments, SampleOptions)
    run = Run.open(folder)
    codec = open_codec(run, sampling)
    if sampling.chat:
        return sample_replies(run, codec, sampling)
    if sampling.prompt == SampleOptions.prompt:
        prompt = codec.beginning or run.vocabulary.first_ids().tolist()
    else:
        prompt = codec.encode(sampling.prompt, source="prompt")
    model, params = load_model(run, sampling)
    generator = Generator(model)
    if sampling.samples == 1 and sys.stdout.isatty() and jax.process_index() == 0:
        terminal = Terminal(_make_stops(codec, sampling).cut, prompt[_count_hidden(codec, prompt) :])
        list(sample_texts(codec, generator, params, sampling, prompt, terminal))
        print()
    else:
        for i, text in enumerate(sample_texts(codec, generator, params, sampling, prompt)):
            say_text(f"{RULE}\n{text}" if i else text)


def sample_replies(run: Run, codec: TextCodec, sampling: SampleOptions) -> None:
    """Prints the replies to a message; a terminal shows a single one as it is generated."""
    from shardformer.inference.chat_codec import parse_prompt  # not imported without a chat

    chat = open_chat_codec(run, codec, sampling)
    prompts = chat.encode_all([parse_prompt(sampling.prompt)])
    model, params = load_model(run, sampling)
    is_streamed = sampling.samples == 1 and sys.stdout.isatty() and jax.process_index() == 0
    watch = Terminal(chat.read_reply) if is_streamed else ignore
    stops = chat.make_stops(sampling.ignore_eos)
    rows = Generator(model).stream(params, prompts, sampling, len(run.vocabulary), stops, watch, BATCH)
    for i, row in enumerate(rows):
        reply = chat.read_reply(row.ids)
        say_text("" if is_streamed else f"{RULE}\n{reply}" if i else reply)


def open_codec(run: Run, options: TextOptions) -> TextCodec:
    """Returns the codec of a run; a run without training data was converted, and reads documents as published."""
    bos = run.config.data.bos if options.bos == "auto" else options.bos
    return TextCodec(run.vocabulary, run.special_tokens, bos, options.special_tokens, published=not run.fingerprint)


def choose_chat_vocabulary(run: Run, options: TextOptions) -> Vocabulary:
    """Returns the vocabulary of messages, whose special tokens are letters unless training or the user reads them."""
    if options.special_tokens == "auto":
        return run.vocabulary
    return run.vocabulary.with_special_tokens(options.special_tokens == "true")


def open_chat_codec(run: Run, codec: TextCodec, options: TextOptions, stops: Sequence[str] = ()) -> "ChatCodec":
    """Returns the codec of a run's chat template; raises UsageError if it has none."""
    from shardformer.data.chat.chat_format import read_format  # not imported without a chat
    from shardformer.inference.chat_codec import ChatCodec

    format = run.vocabulary.chat or read_format(Path(run.stored) / TOKENIZER_FOLDER)
    if format is None:
        raise UsageError(
            f"chat=true: {run.out} has no chat template; train it on conversations, or convert a folder with one"
        )
    return ChatCodec(choose_chat_vocabulary(run, options), format, sorted(codec.ends), stops)


def load_model(run: Run, options: WeightsOptions) -> tuple[Model, dict]:
    """Returns the model of a run on the mesh of these options, and its parameters."""
    model = make_model(run, options)
    _, params = run.restore_params(model, options.step, options.ema)
    return model, params


def make_model(run: Run, options: WeightsOptions) -> Model:
    shape = "1x1" if options.mesh == "auto" else options.mesh
    settings = mesh.start(run.config.with_weights(options.weights).for_inference(shape))
    programs.keep_compiled_programs(settings, processes.gather_texts)
    return Model.on(settings, mesh.make(settings))


class Terminal:
    """A text that is printed as its tokens come, up to its last complete character; `read` makes it of ids."""

    def __init__(self, read: Callable[[list[int]], str], prompt: Sequence[int] = ()):
        self._read, self._ids, self._printed = read, list(prompt), 0
        self(0, [])

    def __call__(self, row: int, ids: list[int]) -> None:
        self._ids += ids
        text = self._read(self._ids).rstrip("\N{REPLACEMENT CHARACTER}")
        print(escape_for_terminal(text[self._printed :]), end="", flush=True)
        self._printed = max(self._printed, len(text))


def sample_text(run: Run, generator: Generator, params, sampling: Sampling, watch: Watch = ignore) -> str:
    """Returns a text of a run without a prompt."""
    codec = open_codec(run, TextOptions())
    return next(sample_texts(codec, generator, params, sampling, run.vocabulary.first_ids().tolist(), watch))


def sample_texts(
    codec: TextCodec, generator: Generator, params, sampling: Sampling, prompt: Sequence[int], watch: Watch = ignore
) -> Iterator[str]:
    """Yields the prompt with each of its samples, `BATCH` of which are computed together."""
    stops = _make_stops(codec, sampling)
    rows = generator.stream(params, [prompt], sampling, len(codec.vocabulary), stops, watch, BATCH)
    printed = prompt[_count_hidden(codec, prompt) :]
    return (stops.cut([*printed, *row.ids]) for row in rows)


def _make_stops(codec: TextCodec, sampling: Sampling) -> Stops:
    return Stops(codec.vocabulary, ends=() if sampling.ignore_eos else codec.ends)


def _count_hidden(codec: TextCodec, prompt: Sequence[int]) -> int:
    """Returns how many ids of the prompt are the beginning of text, which is not shown."""
    count = len(codec.beginning)
    return count if list(prompt[:count]) == codec.beginning else 0
