"""What a request adds to its logits before each draw: the biases of tokens and the penalties of repeated ones."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardformer.errors import UsageError
from shardformer.inference.grammars.token_automaton import TokenAutomaton
from shardformer.inference.serve.jobs import Job
from shardformer.inference.serve.request_fields import ApiError, take
from shardformer.inference.serve.response_format import Form

LARGEST_BIAS, LARGEST_PENALTY = 100, 2  # OpenAI's bounds, of both signs
MOST_BIASES, LONGEST_KEY = 1024, 1000  # the characters of a text whose tokens get a bias


@dataclasses.dataclass(frozen=True)
class TokenBias:
    """The bias of each of a row's `size` tokens, which depends on the tokens drawn before, not on the prompt.

    Tokens that the form of the text forbids have -inf.
    """

    size: int
    listed: dict[int, float]
    presence: float = 0.0  # is subtracted once from each token that was drawn
    frequency: float = 0.0  # is subtracted as often as the token was drawn
    form: Form | None = None  # of one job only

    @property
    def is_zero(self) -> bool:
        return not (self.listed or self.presence or self.frequency or self.form)

    def __call__(self, ids: list[int]) -> np.ndarray:
        bias = np.zeros(self.size, np.float32)
        bias[list(self.listed)] = list(self.listed.values())
        if self.presence or self.frequency:
            drawn, counts = np.unique(np.array(ids, np.int64), return_counts=True)
            bias[drawn] -= (self.presence + self.frequency * counts).astype(np.float32)
        if self.form:
            bias[~self.form.allow(ids)] = -np.inf
            if not np.isfinite(bias).any():
                raise RuntimeError("no token of the vocabulary can continue a text of this form")
        return bias


class DrawRules(NamedTuple):
    """The biases and the form that a request asks for."""

    bias: TokenBias
    form: TokenAutomaton | None  # of any text

    def apply(self, job: Job, ends: frozenset[int]) -> None:
        """Gives a job its bias and the form of its text; `ends` are the tokens that end it."""
        bias, stops = self.bias, job.stops
        if self.form:
            form = Form(self.form, ends, job.sampling.tokens)
            bias = dataclasses.replace(bias, form=form)

            def end(ids: list[int]) -> bool:
                return stops(ids) or form.is_final(ids)

            job.stops = end
        if not bias.is_zero:
            job.bias = bias


def read_bias(body: dict[str, Any], size: int, encode: Callable[[str], list[int]]) -> TokenBias:
    """Returns the bias of a request's fields.

    size: the ids that may be drawn. encode: of a text, whose tokens a key of logit_bias may name, as for llama.cpp.
    """
    presence, frequency = (_read_penalty(body, name) for name in ("presence_penalty", "frequency_penalty"))
    listed = _read_listed(body, size, encode)
    return TokenBias(size, listed, presence, frequency)


def _read_penalty(body: dict[str, Any], name: str) -> float:
    value = take(body, name, float, 0.0, -LARGEST_PENALTY, LARGEST_PENALTY)
    return float(value)


def _read_listed(body: dict[str, Any], size: int, encode: Callable[[str], list[int]]) -> dict[int, float]:
    entries = take(body, "logit_bias", dict, {})
    if len(entries) > MOST_BIASES:
        raise ApiError(400, f"logit_bias has {len(entries):,} entries; expected at most {MOST_BIASES:,}", "logit_bias")
    listed: dict[int, float] = {}
    for key, value in entries.items():
        if type(value) not in (int, float) or not abs(value) <= LARGEST_BIAS:
            raise ApiError(
                400, f"logit_bias of {key!r:.60} is {value!r:.60}; expected a number from -{LARGEST_BIAS} to "
                f"{LARGEST_BIAS}", "logit_bias",
            )  # fmt: skip
        if len(key) > LONGEST_KEY:
            raise ApiError(
                400, f"logit_bias has a text of {len(key):,} characters; expected at most {LONGEST_KEY:,}", "logit_bias"
            )
        try:
            ids = [int(key)] if re.fullmatch(r"\s*[+-]?\d+\s*", key) else encode(key)
        except UsageError as error:
            raise ApiError(400, f"logit_bias: {error}", "logit_bias") from None
        if unknown := [token for token in ids if not 0 <= token < size]:
            raise ApiError(
                400, f"logit_bias has the token id {unknown[0]!s:.60}, outside 0..{size - 1}, which the model does not "
                "know", "logit_bias",
            )  # fmt: skip
        listed |= dict.fromkeys(ids, float(value))
    return {token: value for token, value in listed.items() if value}
