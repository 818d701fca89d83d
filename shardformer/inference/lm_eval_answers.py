"""What an evaluation asks of a language model, in texts: log-likelihoods and continuations.

The same questions get the same answers from lm-evaluation-harness's own model `hf`; nothing here imports it.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardformer.data import Vocabulary
from shardformer.errors import UsageError
from shardformer.inference.generator import Generator, Sampling
from shardformer.inference.scoring import Request, Scorer, TargetScore
from shardformer.inference.stop_conditions import Stops
from shardformer.model import Model

NEW_TOKENS = 256  # where a task does not say
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
RULES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Question(NamedTuple):
    """A prompt, and how a task wants it to be continued."""

    prompt: str
    settings: dict


class Answers:
    """One model's. `rows` are computed together and change no answer. bos: each text begins with the tokenizer's own
    first token.
    """

    def __init__(self, model: Model, params, vocabulary: Vocabulary, rows: int, seed: int = 0, bos: bool = False):
        self._params, self._vocabulary, self._rows, self._seed = params, vocabulary, rows, seed
        self._seq = model.config.seq
        self._scorer, self._generator = Scorer(model, rows), Generator(model)
        if bos and vocabulary.first_id is None:
            raise UsageError(f"bos=true: tokenizer={vocabulary.name} puts no token before a text")
        self._bos = [vocabulary.first_id] if bos else []
        known = [*self._bos, vocabulary.end_of_text, int(vocabulary.first_ids()[-1])]
        self.start = next(token for token in known if token is not None)  # before a text that has no context

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[TargetScore]:
        """Of each (context, continuation), what the continuation costs, and whether all of it is the most likely."""
        return self._scorer.score(self._params, [self._split(*pair) for pair in pairs])

    def score_texts(self, texts: Sequence[str]) -> list[TargetScore]:
        """Of whole texts, however long."""
        ids = [self._encode(text)[len(self._bos) :] for text in texts]
        return self._scorer.score(self._params, [Request([self.start], targets) for targets in ids])

    def continue_prompts(self, questions: Sequence[Question]) -> list[str]:
        """Those with the same settings together, the longest prompts first."""
        texts = [""] * len(questions)
        for settings, numbers in self._group(questions):
            sampling, until = self._read_settings(settings)
            stops = Stops(self._vocabulary, until)
            room = self._seq - sampling.tokens
            if room < 1:
                raise UsageError(
                    f"max_gen_toks={sampling.tokens} leaves no room for a prompt in seq={self._seq}; "
                    f"give gen_kwargs=max_gen_toks={max(self._seq // 2, 1)}"
                )
            prompts = [(self._encode(questions[i].prompt) or [self.start])[-room:] for i in numbers]
            order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
            for first in range(0, len(order), self._rows):
                part = order[first : first + self._rows]
                rows = self._generator.continue_prompts(
                    self._params, [prompts[i] for i in part], sampling, len(self._vocabulary), stops
                )
                for i, row in zip(part, rows, strict=True):
                    texts[numbers[i]] = stops.cut(row.ids)
        return texts

    def _encode(self, text: str) -> list[int]:
        return [*self._bos, *self._vocabulary.encode(text).tolist()]

    def _split(self, context: str, continuation: str) -> Request:
        """As one text, because a tokenizer may join what stands at the seam; spaces belong to what follows them."""
        words = context.rstrip()
        continuation = context[len(words) :] + continuation
        before, whole = self._encode(words), self._encode(words + continuation)
        targets = whole[len(before) :]
        if not before and targets[:1] == [self.start]:
            return Request(targets[:1], targets[1:])
        return Request(before or [self.start], targets)

    @staticmethod
    def _group(questions: Sequence[Question]) -> Iterator[tuple[dict, list[int]]]:
        groups: dict[str, list[int]] = {}
        for i, question in enumerate(questions):
            groups.setdefault(json.dumps(question.settings, sort_keys=True), []).append(i)
        return ((json.loads(settings), numbers) for settings, numbers in groups.items())

    def _read_settings(self, settings: dict) -> tuple[Sampling, list[str]]:
        """How to draw, and the strings that end a text. Without do_sample, the most likely token is taken."""
        left = {name: value for name, value in settings.items() if value is not None}
        until = left.pop("until", [])
        limits = [_read_number(name, left.pop(name)) for name in LIMITS if name in left]
        tokens = limits[0] if limits else NEW_TOKENS  # the first counts, as in the harness's own models
        rules = {name: _read_number(name, left.pop(name)) for name in RULES if name in left}
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
