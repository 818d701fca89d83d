"""Answers to the questions of an evaluation, as documents: log-likelihoods and continuations.

The answers equal those of lm-evaluation-harness's model `hf`; nothing here imports the harness.
"""

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shardformer.config.sampling_keys import Sampling
from shardformer.errors import UsageError
from shardformer.inference.generator import Generator
from shardformer.inference.sampling import Stops, cut_text
from shardformer.inference.scoring import Request, Scorer, TargetScore, do_nothing
from shardformer.inference.text_codec import TextCodec
from shardformer.model import Model

NEW_TOKENS = 256  # limit of a task that names none
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
RULES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def check_installed(wanted_by: str) -> None:
    """Raises UsageError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            f"{wanted_by} needs lm-evaluation-harness: pip install 'shardformer[eval]', or pip install lm-eval"
        )


class Question(NamedTuple):
    """A prompt and the settings with which a task wants it to be continued."""

    prompt: str
    settings: dict


class Answers:
    """The answers of one model. `rows` are computed together and change no answer.

    `params` may be replaced; `before_batch` is called before the rows of each batch.
    """

    def __init__(
        self,
        model: Model,
        params,
        codec: TextCodec,
        rows: int,
        seed: int = 0,
        before_batch: Callable[[], None] = do_nothing,
    ):
        self.params, self._codec, self._rows, self._seed = params, codec, rows, seed
        self._seq, self._before_batch = model.config.model.seq, before_batch
        self._scorer, self._generator = Scorer(model, rows, before_batch), Generator(model)
        self._prefix_text = codec.decode([codec.prefix])

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[TargetScore]:
        """Returns the nats of the continuation of each (context, continuation), and whether greedy search gives it."""
        return self._scorer.score(self.params, [self._split(*pair) for pair in pairs])

    def score_documents(self, documents: Sequence[str]) -> list[TargetScore]:
        """Scores documents of any length from their first token on, after the prefix."""
        requests = [Request([self._codec.prefix], self._encode(text)) for text in documents]
        return self._scorer.score(self.params, requests)

    def continue_prompts(self, questions: Sequence[Question]) -> list[str]:
        """Returns the continuation of each question, in order."""
        continuations = [""] * len(questions)
        for settings, indices in self._group(questions):
            sampling, until = self._read_settings(settings)
            stops = Stops(self._codec.vocabulary, until, self._codec.ends)
            room = self._seq - sampling.tokens
            if room < 1:
                raise UsageError(
                    f"max_gen_toks={sampling.tokens} leaves no room for a prompt in seq={self._seq}; "
                    f"give gen_kwargs=max_gen_toks={max(self._seq // 2, 1)}"
                )
            prompts = {i: (self._encode(questions[i].prompt) or [self._codec.prefix])[-room:] for i in indices}
            order = sorted(indices, key=lambda i: -len(prompts[i]))  # rows of one batch have similar lengths
            rows = self._generator.stream(
                self.params, [prompts[i] for i in order], sampling, len(self._codec.vocabulary), stops,
                lambda *_: self._before_batch(), self._rows,
            )  # fmt: skip
            for i, row in zip(order, rows, strict=True):
                continuations[i] = cut_text(self._codec.decode_without_special_tokens(row.ids), until)
        return continuations

    def _encode(self, text: str) -> list[int]:
        """Encodes a text as `hf` does: without a beginning if the text spells the prefix."""
        if text.startswith(self._prefix_text):
            return self._codec.encode_bare(text)
        return self._codec.encode(text)

    def _split(self, context: str, continuation: str) -> Request:
        """Encodes both as one text, as a token may span the border; spaces at the border go to the continuation."""
        prefix = self._codec.prefix
        if not context:
            before, targets = [], self._codec.encode_bare(continuation)
        else:
            text = context.rstrip()
            before = self._encode(text)
            targets = self._encode(text + context[len(text) :] + continuation)[len(before) :]
        if not before and targets[:1] == [prefix]:
            return Request(targets[:1], targets[1:])
        return Request(before or [prefix], targets)

    @staticmethod
    def _group(questions: Sequence[Question]) -> Iterator[tuple[dict, list[int]]]:
        groups: dict[str, list[int]] = {}
        for i, question in enumerate(questions):
            groups.setdefault(json.dumps(question.settings, sort_keys=True), []).append(i)
        return ((json.loads(settings), indices) for settings, indices in groups.items())

    def _read_settings(self, settings: dict) -> tuple[Sampling, list[str]]:
        """Returns the sampling rules and the stop strings. Without do_sample, decoding is greedy."""
        left = {name: value for name, value in settings.items() if value is not None}
        until = left.pop("until", [])
        limits = [_read_number(name, left.pop(name)) for name in LIMITS if name in left]
        tokens = limits[0] if limits else NEW_TOKENS  # the first counts, as in the harness's models
        rules: dict[str, Any] = {name: _read_number(name, left.pop(name)) for name in RULES if name in left}
        draws = left.pop("do_sample", rules.get("temperature", 0) > 0)
        if not draws:
            rules["temperature"] = 0.0
        if left:
            raise UsageError(
                f"the task's generation_kwargs have {', '.join(left)}, which are not computed here; known are until, "
                f"max_gen_toks, do_sample, {', '.join(RULES)}"
            )
        sampling = Sampling(**{"tokens": int(tokens), "temperature": 1.0, "seed": self._seed} | rules)
        return sampling, [until] if isinstance(until, str) else list(until)


def _read_number(name: str, value) -> float:
    try:
        number = value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"the task's generation_kwargs have {name}={value!r:.80}, expected a number")
    return number
