"""Text from a model: on device, with a KV cache, on any mesh."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.errors import UsageError
from shardformer.model import Model
from shardformer.parsing import key

SMALLEST, LARGEST = 1e-37, 1e37  # float32 holds these and their quotients with logits as what they are meant to be


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, and how many."""

    tokens: int = key(500, "number of tokens to write")
    temperature: float = key(0.8, "divides the logits before sampling; 0 always takes the most likely token")
    top_k: int = key(0, "sample among the k most likely tokens; 0 means all")
    top_p: float = key(1.0, "sample among the most likely tokens that together reach this probability")
    samples: int = key(1, "number of texts")
    seed: int = key(0, "seed of the random draws; the same seed gives the same text")
    stride: int = key(1, "tokens dropped at once when the context is full; 1 keeps it full, more is faster")

    def __post_init__(self):
        def need(holds, message):
            if not holds:
                raise UsageError(message)

        for name in ("tokens", "samples", "stride"):
            need(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("top_k", "seed"):
            need(0 <= getattr(self, name) < 2**31, f"{name} must be in 0..2**31 - 1, got {getattr(self, name)}")
        need(0 <= self.temperature < float("inf"), f"temperature must be 0 or more, got {self.temperature}")
        need(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")


class Drawing(NamedTuple):
    """The numbers that a draw depends on. They are arguments of the compiled function: other values compile nothing."""

    temperature: np.float32
    top_k: np.int32
    top_p: np.float32

    @staticmethod
    def by(sampling: Sampling) -> "Drawing":
        temperature = sampling.temperature and min(max(sampling.temperature, SMALLEST), LARGEST)
        top_p = max(sampling.top_p, SMALLEST)
        return Drawing(np.float32(temperature), np.int32(sampling.top_k), np.float32(top_p))


class Generator:
    """Draws text from one model; compiled once, whatever is asked for, but for each number of samples."""

    def __init__(self, model: Model):
        self.model = model
        self._extend = jax.jit(self._extended, out_shardings=model.sharding(P()))

    def generate(self, params, prompt, sampling: Sampling, vocab_size: int | None = None) -> np.ndarray:
        """[samples, len(prompt) + tokens] ids, all below `vocab_size` where the model knows more.

        A token is predicted from at most the last `seq` tokens. While they fill the context, each new one costs a pass
        over one token; once it is full, its oldest `stride` tokens go and the rest are read again: exact for all
        positions.
        """
        config = self.model.config
        vocab_size, drawing, seed = vocab_size or config.vocab, Drawing.by(sampling), np.int32(sampling.seed)
        text = np.tile(np.asarray(prompt, np.int32), (sampling.samples, 1))
        drawn = 0
        while drawn < sampling.tokens:
            length = text.shape[1] if text.shape[1] <= config.seq else config.seq - min(sampling.stride, config.seq) + 1
            count = min(sampling.tokens - drawn, config.seq - length + 1)
            window = np.zeros((sampling.samples, config.seq), np.int32)
            window[:, :length] = text[:, -length:]
            numbers = (np.int32(number) for number in (length, count, drawn, vocab_size))
            ids = self._extend(params, window, *numbers, seed, drawing)
            text = np.concatenate([text, np.asarray(ids)[:, :count]], axis=1)
            drawn += count
        return text

    def _extended(self, params, window_BS, length, count, drawn, vocab_size, seed, drawing: Drawing):
        """The `count` tokens after the first `length` of the window; `drawn` came before them, for their keys."""
        base = jax.random.key(seed)

        def draw(logits_BV, i):
            known_V = jnp.arange(logits_BV.shape[-1]) < vocab_size
            logits_BV = jnp.where(known_V[None], logits_BV, -jnp.inf)
            return choose(logits_BV, jax.random.fold_in(base, drawn + i), drawing)

        def one_more(carry):
            i, token_B, cache, ids_BS = carry
            logits_BV, cache = self.model.decode(params, token_B, length + i - 1, cache)
            token_B = draw(logits_BV, i)
            return i + 1, token_B, cache, ids_BS.at[:, i].set(token_B)

        logits_BV, cache = self.model.prefill(params, window_BS, length)
        first_B = draw(logits_BV, 0)
        ids_BS = jnp.zeros_like(window_BS).at[:, 0].set(first_B)
        carry = (jnp.int32(1), first_B, cache, ids_BS)
        return lax.while_loop(lambda carry: carry[0] < count, one_more, carry)[-1]


def choose(logits_BV, key, drawing: Drawing):
    """One id per row; -inf never comes up."""
    greedy = lambda: logits_BV.argmax(-1).astype(jnp.int32)
    return lax.cond(drawing.temperature == 0, greedy, lambda: _draw(logits_BV, key, drawing))


def _draw(logits_BV, key, drawing: Drawing):
    # From the largest down: that one stays 0 at any temperature, where infinity divided by infinity is not a number.
    logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / drawing.temperature

    def keep_top_k():
        return _keep_most_likely(logits_BV, jnp.isfinite(logits_BV).astype(jnp.float32), drawing.top_k)

    logits_BV = lax.cond(drawing.top_k > 0, keep_top_k, lambda: logits_BV)
    keep_top_p = lambda: _keep_most_likely(logits_BV, jax.nn.softmax(logits_BV, axis=-1), drawing.top_p)
    logits_BV = lax.cond(drawing.top_p < 1, keep_top_p, lambda: logits_BV)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


def _keep_most_likely(logits_BV, weight_BV, least):
    """The fewest of the largest logits that together weigh `least`, and what equals the last of them; -inf elsewhere.

    Their edge is found by bisection over the float's bits, 32 sums where sorting a vocabulary costs many times as much.
    """
    bits_BV = lax.bitcast_convert_type(logits_BV, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits_BV & sign, ~bits_BV, bits_BV | sign)  # ordered as the logits are

    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1) // 2
        weight_B1 = jnp.where(order_BV >= middle_B1, weight_BV, 0).sum(-1, keepdims=True)
        enough_B1 = weight_B1 >= jnp.asarray(least, weight_BV.dtype)
        return jnp.where(enough_B1, middle_B1, low_B1), jnp.where(enough_B1, high_B1, middle_B1)

    zero_B1 = jnp.zeros_like(order_BV[:, :1])
    edge_B1, _ = lax.fori_loop(0, 32, halve, (zero_B1, ~zero_B1))
    return jnp.where(order_BV >= edge_B1, logits_BV, -jnp.inf)
