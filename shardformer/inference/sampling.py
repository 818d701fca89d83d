"""The sampling rules: how the next token is drawn from a row of logits."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config.sampling_keys import Sampling
from shardformer.data import Vocabulary

SMALLEST, LARGEST = 1e-37, 1e37  # bounds of temperature and top_p, beyond which float32 overflows


class Drawing(NamedTuple):
    """The fields of a `Sampling` on which a draw depends.

    They are arguments of the compiled function, so that other values compile nothing. Each may be an array [B].
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any

    @staticmethod
    def from_sampling(sampling: Sampling) -> "Drawing":
        temperature = sampling.temperature and min(max(sampling.temperature, SMALLEST), LARGEST)
        top_p = max(sampling.top_p, SMALLEST)
        return Drawing(
            np.float32(temperature), np.int32(sampling.top_k), np.float32(top_p), np.float32(sampling.min_p),
            np.float32(sampling.repetition_penalty),
        )  # fmt: skip


def choose_tokens(logits_BV, key_B, drawing: Drawing, seen_BV=None, bias_BV=None, biased=True) -> jax.Array:
    """Returns one id per row, each drawn with its key. A token whose logit is -inf is never drawn.

    drawing: values for all rows, or [B] of each row, which do not change the draws of other rows.
    seen_BV: the tokens that the repetition penalty makes less likely.
    bias_BV: what is then added to the logits, -inf for a token that must not be drawn; nothing unless `biased`.
    """
    drawing = Drawing(*(jnp.broadcast_to(value, len(logits_BV))[:, None] for value in drawing))
    if seen_BV is not None:
        factor_B1 = drawing.repetition_penalty
        penalised_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
        logits_BV = jnp.where(seen_BV, penalised_BV, logits_BV)
    if bias_BV is not None:
        logits_BV = lax.cond(biased, lambda: logits_BV + bias_BV, lambda: logits_BV)
    greedy_B1 = drawing.temperature == 0

    def draw():
        rules = drawing._replace(temperature=jnp.where(greedy_B1, 1, drawing.temperature))
        return jnp.where(greedy_B1[:, 0], find_largest(logits_BV), _draw(logits_BV, key_B, rules))

    return lax.cond(greedy_B1.all(), lambda: find_largest(logits_BV), draw)


def find_largest(x_BV) -> jax.Array:
    """Returns the index of each row's first maximum: argmax as two maxima, 10 times as fast on a CPU."""
    V = x_BV.shape[-1]
    from_the_end_V = V - jnp.arange(V, dtype=jnp.float32)  # exact up to 2**24
    smaller_BV = x_BV < x_BV.max(-1, keepdims=True)
    return V - jnp.where(smaller_BV, 0, from_the_end_V[None]).max(-1).astype(jnp.int32)


def _draw(logits_BV, key_B, drawing: Drawing) -> jax.Array:
    # The maximum is moved to 0, where any temperature leaves it; inf / inf would be NaN.
    logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / drawing.temperature

    def keep_top_k():
        likely_BV = _keep_most_likely(logits_BV, jnp.isfinite(logits_BV).astype(jnp.float32), drawing.top_k)
        return jnp.where(drawing.top_k > 0, likely_BV, logits_BV)

    logits_BV = lax.cond((drawing.top_k > 0).any(), keep_top_k, lambda: logits_BV)

    def keep_top_p():
        likely_BV = _keep_most_likely(logits_BV, jax.nn.softmax(logits_BV, axis=-1), drawing.top_p)
        return jnp.where(drawing.top_p < 1, likely_BV, logits_BV)

    logits_BV = lax.cond((drawing.top_p < 1).any(), keep_top_p, lambda: logits_BV)
    logits_BV = jnp.where(logits_BV >= jnp.log(drawing.min_p), logits_BV, -jnp.inf)
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(key_B)
    return find_largest(logits_BV + noise_BV)  # equals jax.random.categorical


def _keep_most_likely(logits_BV, weight_BV, least) -> jax.Array:
    """Keeps the fewest largest logits that together weigh `least`, and all that equal the last of them; others: -inf.

    The smallest kept logit is found by bisection over the bits of a float: 32 sums, many times faster than a sort.
    """
    bits_BV = lax.bitcast_convert_type(logits_BV, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits_BV & sign, ~bits_BV, bits_BV | sign)  # unsigned integers in the order of the logits

    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1) // 2
        weight_B1 = jnp.where(order_BV >= middle_B1, weight_BV, 0).sum(-1, keepdims=True)
        enough_B1 = weight_B1 >= jnp.asarray(least, weight_BV.dtype)
        return jnp.where(enough_B1, middle_B1, low_B1), jnp.where(enough_B1, high_B1, middle_B1)

    zero_B1 = jnp.zeros_like(order_BV[:, :1])
    edge_B1, _ = lax.fori_loop(0, 32, halve, (zero_B1, ~zero_B1))
    return jnp.where(order_BV >= edge_B1, logits_BV, -jnp.inf)


class Stops:
    """A condition for `Generator`: the text has one of `strings`, or its last id is one of `ends`.

    By default the only end is the vocabulary's end of text.
    """

    def __init__(self, vocabulary: Vocabulary, strings: Sequence[str] = (), ends: Collection[int] | None = None):
        self._decode = vocabulary.decode
        self._strings = [string for string in strings if string]
        default = [] if vocabulary.end_of_text is None else [vocabulary.end_of_text]
        self._ends = frozenset(default if ends is None else ends)

    def __call__(self, ids: list[int]) -> bool:
        """Returns whether the last of these ids ends the text."""
        if ids and ids[-1] in self._ends:
            return True
        # A token has at least one byte. The extra tokens are for a first one that is part of a character.
        return any(string in self._decode(ids[-len(string.encode()) - 8 :]) for string in self._strings)

    def cut(self, ids: list[int]) -> str:
        """Returns the text before the end."""
        return cut_text(self._decode(ids[:-1] if ids and ids[-1] in self._ends else ids), self._strings)


def cut_text(text: str, strings: Sequence[str]) -> str:
    """Returns the text before the first of `strings`."""
    return text[: min((text.find(string) for string in strings if string and string in text), default=len(text))]
