"""Text from a model: on device, with a KV cache, on any mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.config.parsing import key
from shardformer.errors import UsageError
from shardformer.kernels.threefry import STANDARD
from shardformer.model import CACHE, ROWS, Model
from shardformer.shards.parameters import is_factor_of_product, map_stacked

SMALLEST, LARGEST = 1e-37, 1e37  # a temperature or top_p beyond these would overflow float32
CHUNK = 16  # tokens drawn before the host looks at them
SMALLEST_CACHE = 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, and how many."""

    tokens: int = key(500, "number of tokens to write")
    temperature: float = key(0.8, "divides the logits before sampling; 0 always takes the most likely token")
    top_k: int = key(0, "sample among the k most likely tokens; 0 means all")
    top_p: float = key(1.0, "sample among the most likely tokens that together reach this probability")
    min_p: float = key(0.0, "sample among the tokens with at least this share of the most likely one's probability")
    repetition_penalty: float = key(1.0, "above 1 makes tokens of the context less likely, as in CTRL; 1 means none")
    samples: int = key(1, "number of texts per prompt")
    seed: int = key(0, "seed of the random draws; the same seed gives the same text")
    ignore_eos: bool = key(False, "write on after the tokenizer's end of a text, such as <|endoftext|>")
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
        need(0 <= self.min_p <= 1, f"min_p must be in 0..1, got {self.min_p}")
        need(0.01 <= self.repetition_penalty <= 100,
             f"repetition_penalty must be in 0.01..100, got {self.repetition_penalty}")  # fmt: skip


class Drawing(NamedTuple):
    """The numbers that a draw depends on. They are arguments of the compiled function: other values compile nothing."""

    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    min_p: np.float32
    repetition_penalty: np.float32

    @staticmethod
    def from_sampling(sampling: Sampling) -> "Drawing":
        temperature = sampling.temperature and min(max(sampling.temperature, SMALLEST), LARGEST)
        top_p = max(sampling.top_p, SMALLEST)
        return Drawing(
            np.float32(temperature), np.int32(sampling.top_k), np.float32(top_p), np.float32(sampling.min_p),
            np.float32(sampling.repetition_penalty),
        )  # fmt: skip


class Continuation(NamedTuple):
    """What follows one prompt."""

    ids: list[int]
    logprobs: list[float]  # of each id, in nats, under the model itself: before temperature and the other rules
    stopped: bool  # by `stops`; else it has as many tokens as were asked for


class _Parameters(NamedTuple):
    """Of one model, in both forms."""

    stacked: dict  # for reading a context
    unstacked: dict  # for one more token


class _Decoding(NamedTuple):
    """The rows between two tokens."""

    logits_BV: jax.Array
    caches: list  # of each layer
    slot: jax.Array  # of the next token in the caches: the same for all rows, because their ends are aligned
    position_B: jax.Array  # where the next token will stand
    seen_BV: jax.Array  # the tokens of each row's context


class Generator:
    """Draws text from one model. Compiled once for each number of rows and length of cache, rounded up to powers of 2,
    whatever else is asked for.
    """

    def __init__(self, model: Model):
        if model.config.pp > 1:
            raise UsageError("a model with pipeline stages draws no text; make one of config.without_stages()")
        self.model = model
        rows, replicated = model.sharding(ROWS), model.sharding(P())
        self._to_rows = lambda array: jax.device_put(array, rows)
        unstacked = jax.tree.map(model.sharding, model.unstacked_specs)
        self._unstack_layers = jax.jit(functools.partial(_unstack_layers, model.config), out_shardings=unstacked)
        # Given for both functions, or the second call of one would compile it again for the other's layout.
        layout = _Decoding(model.sharding(P("dp", "mp")), model.sharding(CACHE), replicated, rows, rows)
        self._read = jax.jit(self._read_context, static_argnames="cache_size", out_shardings=layout)
        results = layout, replicated, replicated
        self._draw = jax.jit(self._draw_tokens, donate_argnames="decoding", out_shardings=results)

    def generate(self, params, prompt, sampling: Sampling, vocab_size: int | None = None) -> np.ndarray:
        """[samples, len(prompt) + tokens] ids: `continue_prompts` for one prompt without stops."""
        rows = self.continue_prompts(params, [prompt], sampling, vocab_size)
        return np.array([[*prompt, *row.ids] for row in rows], np.int32)

    def continue_prompts(
        self,
        params,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        vocab_size: int | None = None,
        stops: Callable[[list[int]], bool] = lambda ids: False,
        watch: Callable[[int, list[int]], None] = lambda row, ids: None,
    ) -> list[Continuation]:
        """`samples` continuations of each prompt, in their order; all ids are below `vocab_size`.

        A token is predicted from at most the last `seq` tokens. While they fill the context, each new one costs a pass
        over one token; once it is full, its oldest `stride` tokens go and the rest are read again: exact for all
        positions. What a row becomes depends on its prompt, the seed and the number of its sample alone.
        `stops(ids)` ends a row at the first of its continuations for which it holds; `watch(row, ids)` is told of new
        ids as they come.
        """
        vocab_size = vocab_size or self.model.config.vocab
        rows = [_Row(list(map(int, prompt)), s) for prompt in prompts for s in range(sampling.samples)]
        if any(not row.prompt for row in rows):
            raise UsageError("a prompt has no tokens; give at least one")
        if not all(0 <= token < vocab_size for row in rows for token in row.prompt):
            raise UsageError(f"a prompt has token ids outside 0..{vocab_size - 1}, which the model does not know")
        params = _Parameters(params, self._unstack_layers(params))
        while any(not row.ended(sampling) for row in rows):
            self._fill_contexts(params, rows, sampling, vocab_size, stops, watch)
        return [Continuation(row.ids, row.logprobs, row.stopped) for row in rows]

    def _fill_contexts(self, params, rows, sampling, vocab_size, stops, watch) -> None:
        """Reads every row's context and draws until one of them is full or all rows have ended."""
        seq, drawing = self.model.config.seq, Drawing.from_sampling(sampling)
        for row in rows:
            row.shorten_context(seq, sampling.stride)
        # A row that has ended takes no more tokens: its context must not fill the window of the others.
        contexts = [row.prompt[:1] if row.ended(sampling) else row.context for row in rows]
        longest = max(map(len, contexts))
        missing = max(sampling.tokens - len(row.ids) for row in rows if not row.ended(sampling))
        count = min(missing, seq - longest + 1)
        cache_size = min(_round_up(longest + count, SMALLEST_CACHE), seq)
        padded = _round_up(-(-len(rows) // self.model.config.dp)) * self.model.config.dp
        window = np.zeros((padded, min(_round_up(longest, SMALLEST_CACHE), seq)), np.int32)
        lengths, samples, drawn = np.ones(padded, np.int32), np.zeros(padded, np.int32), np.zeros(padded, np.int32)
        for i, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            window[i, : len(context)] = context
            lengths[i], samples[i], drawn[i] = len(context), row.sample, len(row.ids)
        window, lengths, samples, drawn = map(self._to_rows, (window, lengths, samples, drawn))
        decoding = self._read(params.stacked, window, lengths, np.int32(longest), cache_size=cache_size)
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            numbers = np.int32(sampling.seed), np.int32(size), np.int32(start), np.int32(vocab_size)
            decoding, ids, logprobs = self._draw(params.unstacked, decoding, samples, drawn, *numbers, drawing)
            ids, logprobs = np.asarray(ids), np.asarray(logprobs)
            for i, row in enumerate(rows):
                new = row.take(ids[i, :size].tolist(), logprobs[i, :size].tolist(), sampling, stops)
                if new:
                    watch(i, new)
            if all(row.ended(sampling) for row in rows):
                return

    def _read_context(self, params, window_BP, length_B, end, *, cache_size: int) -> _Decoding:
        logits_BV, caches = self.model.prefill(params, window_BP, length_B, end, cache_size)
        inside_BP = jnp.arange(window_BP.shape[1])[None] < length_B[:, None]
        column_BP = jnp.where(inside_BP, window_BP, logits_BV.shape[1])  # padding marks nothing
        row_B1 = jnp.arange(window_BP.shape[0])[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[row_B1, column_BP].set(True, mode="drop")
        return _Decoding(logits_BV, caches, end, length_B, seen_BV)

    def _draw_tokens(self, unstacked, decoding, sample_B, drawn_B, seed, count, start, vocab_size, drawing: Drawing):
        """The next `count` tokens of each row and their log-probabilities, after `start` since the context was read."""
        base = jax.random.key(seed, impl=STANDARD)
        sample_keys = jax.vmap(lambda sample: jax.random.fold_in(base, sample))(sample_B)
        rows = len(sample_B)
        row_B = jnp.arange(rows)

        def draw_one(carry):
            i, decoding, ids_BC, logprobs_BC = carry
            logits_BV, caches, slot, position_B, seen_BV = decoding
            known_V = jnp.arange(logits_BV.shape[-1]) < vocab_size
            logits_BV = jnp.where(known_V[None], logits_BV, -jnp.inf)
            keys = jax.vmap(jax.random.fold_in)(sample_keys, drawn_B + start + i)
            token_B = choose_tokens(logits_BV, keys, drawing, seen_BV)
            logprob_B = jax.nn.log_softmax(logits_BV, axis=-1)[row_B, token_B]
            logits_BV, caches = self.model.decode(unstacked, token_B, position_B, caches, slot)
            seen_BV = seen_BV.at[row_B, token_B].set(True)
            decoding = _Decoding(logits_BV, caches, slot + 1, position_B + 1, seen_BV)
            return i + 1, decoding, ids_BC.at[:, i].set(token_B), logprobs_BC.at[:, i].set(logprob_B)

        carry = jnp.int32(0), decoding, jnp.zeros((rows, CHUNK), jnp.int32), jnp.zeros((rows, CHUNK), jnp.float32)
        return lax.while_loop(lambda carry: carry[0] < count, draw_one, carry)[1:]


@dataclasses.dataclass
class _Row:
    """One continuation as it grows."""

    prompt: list[int]
    sample: int  # its number among those of the prompt
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    stopped: bool = False
    first: int = 0  # where the context begins

    @property
    def context(self) -> list[int]:
        return (self.prompt + self.ids)[self.first :]

    def shorten_context(self, seq: int, stride: int) -> None:
        length = len(self.prompt) + len(self.ids)
        if length - self.first > seq:
            self.first = length - (seq - min(stride, seq) + 1)

    def ended(self, sampling: Sampling) -> bool:
        return self.stopped or len(self.ids) >= sampling.tokens

    def take(self, ids: list[int], logprobs: list[float], sampling: Sampling, stops) -> list[int]:
        """Those of the new ids that belong to the row."""
        before = len(self.ids)
        for token, logprob in zip(ids, logprobs, strict=True):
            if self.ended(sampling):
                break
            self.ids.append(token)
            self.logprobs.append(logprob)
            self.stopped = stops(self.ids)
        return self.ids[before:]


def _unstack_layers(config: Config, params):
    """The parameters for `Model.decode`: a list of the layers' arrays in the type that they multiply in.

    From a stacked array XLA would copy each layer's part for every token.
    """

    def unstack(name, leaf):
        dtype = config.dtype if is_factor_of_product(name) else leaf.dtype
        return [leaf[i].astype(dtype) for i in range(config.layers)]

    return map_stacked(unstack, params)


def _round_up(size: int, least: int = 1) -> int:
    """To a power of 2, so that few sizes are compiled."""
    return max(least, 1 << (size - 1).bit_length())


def choose_tokens(logits_BV, key_B, drawing: Drawing, seen_BV=None):
    """One id per row, with a key of its own, never one whose logit is -inf. The repetition penalty is for seen_BV."""
    if seen_BV is not None:
        factor = drawing.repetition_penalty
        penalised_BV = jnp.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
        logits_BV = jnp.where(seen_BV, penalised_BV, logits_BV)
    greedy = lambda: find_largest(logits_BV)
    return lax.cond(drawing.temperature == 0, greedy, lambda: _draw(logits_BV, key_B, drawing))


def find_largest(x_BV):
    """The first of each row's largest: argmax as two maxima, which a CPU computes ten times as fast."""
    V = x_BV.shape[-1]
    from_the_end_V = V - jnp.arange(V, dtype=jnp.float32)  # exact up to 2**24
    smaller_BV = x_BV < x_BV.max(-1, keepdims=True)
    return V - jnp.where(smaller_BV, 0, from_the_end_V[None]).max(-1).astype(jnp.int32)


def _draw(logits_BV, key_B, drawing: Drawing):
    # From the largest down: that one stays 0 at any temperature, where infinity divided by infinity is not a number.
    logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / drawing.temperature

    def keep_top_k():
        return _keep_most_likely(logits_BV, jnp.isfinite(logits_BV).astype(jnp.float32), drawing.top_k)

    logits_BV = lax.cond(drawing.top_k > 0, keep_top_k, lambda: logits_BV)
    keep_top_p = lambda: _keep_most_likely(logits_BV, jax.nn.softmax(logits_BV, axis=-1), drawing.top_p)
    logits_BV = lax.cond(drawing.top_p < 1, keep_top_p, lambda: logits_BV)
    logits_BV = jnp.where(logits_BV >= jnp.log(drawing.min_p), logits_BV, -jnp.inf)
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(key_B)
    return find_largest(logits_BV + noise_BV)  # jax.random.categorical


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
