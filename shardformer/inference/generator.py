"""Text from a model: on device, with a KV cache, on any mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.config.sampling_keys import Sampling
from shardformer.devices import programs
from shardformer.errors import UsageError
from shardformer.inference.sampling import Drawing, choose_tokens
from shardformer.inference.unstacking import Unstacking
from shardformer.kernels.attention import drop_single_axes
from shardformer.kernels.threefry import THREEFRY
from shardformer.model import ROWS, Decoder, Model, with_shardings

CHUNK = 16  # tokens drawn between two looks of the host
SMALLEST_CACHE = 16

Stop = Callable[[list[int]], bool]
Watch = Callable[[int, list[int]], None]


class Continuation(NamedTuple):
    """The tokens that follow one prompt."""

    ids: list[int]
    logprobs: list[float]  # of each id, in nats, under the model itself: before temperature and the other rules
    stopped: bool  # by `stops`; otherwise `ids` has as many tokens as were asked for


class LoadedParameters(NamedTuple):
    """The parameters of one model in two forms."""

    stacked: dict  # for reading a context
    unstacked: dict  # for decoding one token


class _Decoding(NamedTuple):
    """The state of all rows between two tokens."""

    logits_BV: jax.Array
    caches: list  # of each layer, and perhaps of ids behind them
    slot: jax.Array  # index of the next token in the caches, the same for all rows: their ends are aligned
    position_B: jax.Array  # position of the next token in its row
    seen_BV: jax.Array  # the tokens of each row's context


class _Request(NamedTuple):
    """The arguments of one call of `Generator`."""

    params: LoadedParameters
    sampling: Sampling
    vocab_size: int
    stops: Stop
    watch: Watch


def never_stop(ids: list[int]) -> bool:
    return False


def ignore(row: int, ids: list[int]) -> None:
    pass


class Generator:
    """The text of one model, drawn token by token.

    Compiles once for each number of rows and each cache length, both rounded up to powers of 2.
    """

    def __init__(self, model: Model):
        check_stages(model)
        self.model, self.decoder = model, Decoder(model)
        rows, replicated = model.sharding(ROWS), model.sharding(P())
        self._to_rows = functools.partial(place, sharding=rows)
        self._unstack_layers = Unstacking(model)
        # Both functions are given the layout: otherwise the second call of one compiles it for the other's layout.
        logits, caches = model.sharding(P("dp", "mp")), model.sharding(self.decoder.cache_spec)
        layout = self._layout = _Decoding._make((logits, caches, replicated, rows, rows))
        self._read = programs.jit(self._read_context, static_argnames="cache_size", out_shardings=layout)
        results = layout, replicated, replicated
        self._draw = programs.jit(self._draw_tokens, donate_argnames="decoding", out_shardings=results)

    def load(self, params: dict) -> LoadedParameters:
        """Returns the parameters, and a second copy of the layers, by which one token is decoded.

        `generate`, `continue_prompts` and `stream` load parameters at each call, unless they are loaded already.
        """
        return LoadedParameters(params, self._unstack_layers(params))

    def generate(self, params, prompt: Sequence[int], sampling: Sampling, vocab_size: int | None = None) -> np.ndarray:
        """Returns [samples, len(prompt) + tokens] ids: `continue_prompts` for one prompt without stops."""
        rows = self.continue_prompts(params, [prompt], sampling, vocab_size)
        return np.array([[*prompt, *row.ids] for row in rows], np.int32)

    def continue_prompts(
        self,
        params,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        vocab_size: int | None = None,
        stops: Stop = never_stop,
        watch: Watch = ignore,
        batch: int | None = None,
        apart: bool = False,
    ) -> list[Continuation]:
        """Returns the list of `stream`; by default all rows are computed together."""
        batch = batch or max(len(prompts) * sampling.samples, 1)
        return list(self.stream(params, prompts, sampling, vocab_size, stops, watch, batch, apart))

    def stream(
        self,
        params,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        vocab_size: int | None = None,
        stops: Stop = never_stop,
        watch: Watch = ignore,
        batch: int = 16,
        apart: bool = False,
    ) -> Iterator[Continuation]:
        """Yields `samples` continuations of each prompt, in order; computes `batch` rows together.

        A token is predicted from at most the last `seq` tokens. Until the context is full, each token costs a pass over
        one token. When it is full, its oldest `stride` tokens are dropped and the rest is reread, which is exact
        for all positions. A row depends only on its prompt, the seed and its sample number. With
        `apart`, it has the random draws of its number among all rows instead, so that no two prompts share any.

        Every generated id is below `vocab_size`. `stops(ids)` is called after each token and ends the row if true.
        `watch(row, ids)` receives new ids as they come; rows are numbered over all prompts.
        """
        vocab_size = vocab_size or self.model.config.model.vocab
        contexts = [list(map(int, prompt)) for prompt in prompts]
        check_prompts(contexts, vocab_size)
        loaded = params if isinstance(params, LoadedParameters) else self.load(params)
        request = _Request(loaded, sampling, vocab_size, stops, watch)
        row_numbers = itertools.count()
        repeated = [context for context in contexts for _ in range(sampling.samples)]
        numbers = range(len(repeated)) if apart else itertools.cycle(range(sampling.samples))
        pairs = zip(repeated, numbers, strict=False)
        while rows := [Row(next(row_numbers), *pair) for pair in itertools.islice(pairs, batch)]:
            while any(not row.ended(sampling) for row in rows):
                self._fill_contexts(request, rows)
            yield from (Continuation(row.ids, row.logprobs, row.stopped) for row in rows)

    def compile(self, params, prompt: Sequence[int], sampling: Sampling, vocab_size: int) -> None:
        """Compiles the programs that `stream` runs first for a prompt; `params` are shapes with shardings."""
        row = Row(0, list(prompt), 0)
        row.shorten_context(self.model.config.model.seq, sampling.stride)
        count = self._count_new([row], [row.context], sampling)
        *arguments, sample_B, drawn_B, cache_size = self._place_rows([row], [row.context], len(row.context) + count)
        unstacking, unstacked = self._unstack_layers.lower(params)
        reading = self._read.lower(params, *arguments, cache_size=cache_size)
        decoding = with_shardings(reading.out_info, jax.tree.broadcast(self._layout, reading.out_info))
        values = _list_values(sampling, min(CHUNK, count), 0, vocab_size)
        drawing = self._draw.lower(unstacked, decoding, sample_B, drawn_B, *values)
        for lowered in (*unstacking, reading, drawing):
            lowered.compile()

    def _fill_contexts(self, request: _Request, rows: list["Row"]) -> None:
        """Reads every row's context and draws tokens until one context is full or all rows have ended."""
        sampling, seq = request.sampling, self.model.config.model.seq
        for row in rows:
            row.shorten_context(seq, sampling.stride)
        # The context of an ended row is cut to one token: it must not fill the window of the others.
        contexts = [row.prompt[:1] if row.ended(sampling) else row.context for row in rows]
        count = self._count_new(rows, contexts, sampling)
        length = max(map(len, contexts)) + count
        *arguments, samples, drawn, cache_size = self._place_rows(rows, contexts, length)
        decoding = self._read(request.params.stacked, *arguments, cache_size=cache_size)
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            values = _list_values(sampling, size, start, request.vocab_size)
            decoding, *results = self._draw(request.params.unstacked, decoding, samples, drawn, *values)
            ids, logprobs = map(np.asarray, results)
            for i, row in enumerate(rows):
                new = row.take(ids[i, :size].tolist(), logprobs[i, :size].tolist(), sampling, request.stops)
                if new:
                    request.watch(row.number, new)
            if all(row.ended(sampling) for row in rows):
                return

    def _count_new(self, rows: list["Row"], contexts: list[list[int]], sampling: Sampling) -> int:
        """Returns how many tokens to draw before a context is full or all rows have ended."""
        missing = max(sampling.tokens - len(row.ids) for row in rows if not row.ended(sampling))
        count = min(missing, self.model.config.model.seq - max(map(len, contexts)) + 1)
        if limit := self.model.config.model.longest_short_row:  # a row that becomes longer is reread
            count = min([count, *(limit - len(context) + 1 for context in contexts if len(context) <= limit)])
        return count

    def _place_rows(self, rows: list["Row"], contexts: list[list[int]], length: int) -> tuple:
        """Returns the contexts and their lengths, the longest, each row's sample number and its count of drawn tokens.

        The last value is the size of caches that hold `length` tokens.
        """
        seq, dp, cp = self.model.config.model.seq, self.model.config.parallel.dp, self.model.config.parallel.cp
        longest = max(map(len, contexts))
        tokens = min(round_up_tokens(round_up(longest, SMALLEST_CACHE), cp), seq)
        padded = round_up(-(-len(rows) // dp)) * dp
        window = np.zeros((padded, tokens), np.int32)
        lengths, samples, drawn = np.ones(padded, np.int32), np.zeros(padded, np.int32), np.zeros(padded, np.int32)
        for i, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            window[i, : len(context)] = context
            lengths[i], samples[i], drawn[i] = len(context), row.sample, len(row.ids)
        cache_size = min(round_up(length, SMALLEST_CACHE), seq)
        placed = [self._to_rows(array) for array in (window, lengths, samples, drawn)]
        return *placed[:2], np.int32(longest), *placed[2:], cache_size

    def _read_context(self, params, window_BP, length_B, end, *, cache_size: int) -> _Decoding:
        logits_BV, caches = self.decoder.prefill(params, window_BP, length_B, end, cache_size)
        inside_BP = jnp.arange(window_BP.shape[1])[None] < length_B[:, None]
        column_BP = jnp.where(inside_BP, window_BP, logits_BV.shape[1])  # padding is outside, where mode="drop" acts
        row_B1 = jnp.arange(window_BP.shape[0])[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[row_B1, column_BP].set(True, mode="drop")
        return _Decoding(logits_BV, caches, end, length_B, seen_BV)

    def _draw_tokens(self, unstacked, decoding, sample_B, drawn_B, seed, count, start, vocab_size, drawing: Drawing):
        """Returns the state, ids [B, CHUNK] and log-probabilities [B, CHUNK] after `count` more tokens of each row.

        start: tokens drawn since the context was read.
        """
        base = jax.random.key(seed, impl=THREEFRY)
        sample_keys = jax.vmap(lambda sample: jax.random.fold_in(base, sample))(sample_B)
        rows = len(sample_B)
        row_B = jnp.arange(rows)

        def draw_one(carry):
            i, decoding, ids_BC, logprobs_BC = carry
            logits_BV, caches, slot, position_B, seen_BV = decoding
            known_V = jnp.arange(logits_BV.shape[-1]) < vocab_size
            keys = jax.vmap(jax.random.fold_in)(sample_keys, drawn_B + start + i)
            token_B = choose_tokens(jnp.where(known_V[None], logits_BV, -jnp.inf), keys, drawing, seen_BV)
            # Over all of the model's entries, as `score` and transformers do, though the tokenizer may have fewer.
            logprob_B = jax.nn.log_softmax(logits_BV, axis=-1)[row_B, token_B]
            caches = jax.tree.map(jnp.reshape, caches, cache_shapes)
            logits_BV, caches = self.decoder.decode(unstacked, token_B, position_B, caches, slot)
            seen_BV = seen_BV.at[row_B, token_B].set(True)
            decoding = _Decoding(logits_BV, drop_single_axes(caches), slot + 1, position_B + 1, seen_BV)
            return i + 1, decoding, ids_BC.at[:, i].set(token_B), logprobs_BC.at[:, i].set(logprob_B)

        cache_shapes = jax.tree.map(jnp.shape, decoding.caches)
        decoding = decoding._replace(caches=drop_single_axes(decoding.caches))
        carry = jnp.int32(0), decoding, jnp.zeros((rows, CHUNK), jnp.int32), jnp.zeros((rows, CHUNK), jnp.float32)
        _, decoding, *results = lax.while_loop(lambda carry: carry[0] < count, draw_one, carry)
        return decoding._replace(caches=jax.tree.map(jnp.reshape, decoding.caches, cache_shapes)), *results


@dataclasses.dataclass(eq=False)
class Row:
    """One continuation as it grows."""

    number: int  # among all rows of the call
    prompt: list[int]
    sample: int  # number among the samples of the prompt
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    stopped: bool = False
    first: int = 0  # index of the first token of the context

    @property
    def context(self) -> list[int]:
        return (self.prompt + self.ids)[self.first :]

    def shorten_context(self, seq: int, stride: int) -> None:
        length = len(self.prompt) + len(self.ids)
        if length - self.first > seq:
            self.first = length - (seq - min(stride, seq) + 1)

    def ended(self, sampling: Sampling) -> bool:
        return self.stopped or len(self.ids) >= sampling.tokens

    def take(self, ids: list[int], logprobs: list[float], sampling: Sampling, stops: Stop) -> list[int]:
        """Appends the new ids until the row ends; returns the appended ones."""
        before = len(self.ids)
        for token, logprob in zip(ids, logprobs, strict=True):
            if self.ended(sampling):
                break
            self.ids.append(token)
            self.logprobs.append(logprob)
            self.stopped = stops(self.ids)
        return self.ids[before:]


def _list_values(sampling: Sampling, size: int, start: int, vocab_size: int) -> tuple:
    """Returns the last arguments of `_draw_tokens`, for a chunk of `size` tokens."""
    return (*map(np.int32, (sampling.seed, size, start, vocab_size)), Drawing.from_sampling(sampling))


def check_stages(model: Model) -> None:
    if model.config.parallel.pp > 1:
        raise UsageError(
            f"text cannot be generated with pipeline stages, got mesh={model.config.parallel.mesh}; make a Model of "
            "config.without_stages()"
        )


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    if not all(prompts):
        raise UsageError("a prompt has no tokens; give at least one")
    if not all(0 <= min(prompt) <= max(prompt) < vocab_size for prompt in prompts):
        raise UsageError(f"a prompt has token ids outside 0..{vocab_size - 1}, which the model does not know")


def place(rows: np.ndarray, sharding: jax.NamedSharding) -> jax.Array:
    """Returns a global array of rows that every process has; device_put would compile a check that they are equal."""
    return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


def round_up(size: int, least: int = 1) -> int:
    """Returns the next power of 2, so that few sizes are compiled."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def round_up_tokens(tokens: int, cp: int) -> int:
    """Returns the least number of tokens that split over cp."""
    return -(-tokens // (2 * cp)) * 2 * cp if cp > 1 else tokens
