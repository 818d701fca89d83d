"""Text from a model: on device, with a KV cache, on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.errors import UsageError
from shardformer.model import Model
from shardformer.parsing import key


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


def generate(model: Model, params, prompt, sampling: Sampling, known: int | None = None) -> np.ndarray:
    """[samples, len(prompt) + tokens] ids. Only the first `known` ids can come up, where the model has more.

    A token is predicted from at most the last `seq` tokens. While they fill the context, each new one costs a pass over
    one token; once it is full, its oldest `stride` tokens go and the rest are read again: exact for all positions.
    """
    seq = model.config.seq
    extend = functools.partial(_extend, model, sampling, known or model.config.vocab)
    extend = jax.jit(extend, out_shardings=model.sharding(P()))
    text = np.tile(np.asarray(prompt, np.int32), (sampling.samples, 1))
    drawn = 0
    while drawn < sampling.tokens:
        length = text.shape[1] if text.shape[1] <= seq else seq - min(sampling.stride, seq) + 1
        count = min(sampling.tokens - drawn, seq - length + 1)
        window = np.zeros((sampling.samples, seq), np.int32)
        window[:, :length] = text[:, -length:]
        ids = extend(params, window, np.int32(length), np.int32(count), np.int32(drawn))
        text = np.concatenate([text, np.asarray(ids)[:, :count]], axis=1)
        drawn += count
    return text


def choose(logits_BV, key, sampling: Sampling):
    """One id per row; -inf never comes up."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        least_B1 = lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        logits_BV = jnp.where(logits_BV < _nucleus_edge(logits_BV, sampling.top_p), -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


def _nucleus_edge(logits_BV, top_p: float):
    """The smallest logit among the most likely tokens that together reach `top_p`; never fewer than one token."""
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    return jnp.where(before_BV < top_p, sorted_BV, jnp.inf).min(-1, keepdims=True)


def _extend(model: Model, sampling: Sampling, known: int, params, window_BS, length, count, drawn):
    """The `count` tokens that follow the first `length` of the window; `drawn` came before them, for their keys."""
    base = jax.random.key(sampling.seed)

    def draw(logits_BV, i):
        logits_BV = jnp.where((jnp.arange(logits_BV.shape[-1]) < known)[None], logits_BV, -jnp.inf)
        return choose(logits_BV, jax.random.fold_in(base, drawn + i), sampling)

    def one_more(carry):
        i, token_B, cache, ids_BS = carry
        logits_BV, cache = model.decode(params, token_B, length + i - 1, cache)
        token_B = draw(logits_BV, i)
        return i + 1, token_B, cache, ids_BS.at[:, i].set(token_B)

    logits_BV, cache = model.prefill(params, window_BS, length)
    first_B = draw(logits_BV, 0)
    ids_BS = jnp.zeros_like(window_BS).at[:, 0].set(first_B)
    carry = (jnp.int32(1), first_B, cache, ids_BS)
    return lax.while_loop(lambda carry: carry[0] < count, one_more, carry)[-1]
