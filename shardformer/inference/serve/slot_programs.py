"""The compiled programs of the engine. Each computes a row from this row's values only, in shapes that never change."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.devices import programs
from shardformer.inference.generator import CHUNK, SMALLEST_CACHE, place, round_up, round_up_tokens
from shardformer.inference.sampling import Drawing, choose_tokens
from shardformer.inference.unstacking import Unstacking
from shardformer.kernels.attention import Cache, drop_single_axes
from shardformer.kernels.threefry import THREEFRY
from shardformer.model import ROWS, Chunk, Decoder, Model

LONGEST_CHUNK = 256  # tokens of a context that are read at once
LONG = 4  # times the longest chunk: from this length on, the end of a context is read in chunks without padding
MOST_TOP = 20  # most likely tokens that a position can report


class State(NamedTuple):
    """The arrays of all rows, B, between two programs."""

    logits_BV: jax.Array  # after each row's last token
    caches: list[Cache]  # of the layers, then of ids; the token at position p is stored in slot p modulo the slots
    seen_BV: jax.Array  # the tokens of each row's context


class Draws(NamedTuple):
    """The values that decide the draws of each row: integers [B] and the rules [B]."""

    seed: np.ndarray
    sample: np.ndarray
    drawn: np.ndarray  # tokens drawn before
    position: np.ndarray  # of the next token to store; a row that draws nothing writes there what is replaced later
    active: np.ndarray  # 1: draws; 0: stays as it is
    token: np.ndarray  # the row's last one
    rules: Drawing


class Drawn(NamedTuple):
    """The results of `draw`, [B, CHUNK]; [B, CHUNK, top] for the most likely tokens of each position."""

    ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class SlotPrograms:
    """The programs of a model for `slots` rows, rounded up to a multiple of dp.

    A row's results are those of the same program with any other rows. So they depend on the row's own request, on
    `slots` and on the size of the caches.
    """

    def __init__(self, model: Model, slots: int):
        self.model, self.decoder = model, Decoder(model)
        dp = model.config.parallel.dp
        self.rows = -(-slots // dp) * dp
        self._cp = model.config.parallel.cp
        self.longest_chunk = round_up_tokens(min(LONGEST_CHUNK, model.config.model.seq), self._cp)
        self._least_at_end = round_up_tokens(self.longest_chunk // 4, self._cp)  # tokens of a chunk without padding
        self.top = min(MOST_TOP, model.config.model.vocab)
        rows, everywhere, logits = model.sharding(ROWS), model.sharding(P()), model.sharding(P("dp", "mp"))
        self._to_rows = functools.partial(place, sharding=rows)
        self._to_all = functools.partial(place, sharding=everywhere)
        self._to_logits = functools.partial(place, sharding=logits)
        self.unstack = Unstacking(model)
        cache = model.sharding(self.decoder.cache_spec)
        layout = State._make((logits, cache, rows))
        self._empty = programs.jit(self._make_empty, static_argnames="size", out_shardings=layout)
        self._read = programs.jit(self.decoder.extend, out_shardings=layout[:2])
        self._score = programs.jit(self._score_chunk, out_shardings=(layout[:2], *[everywhere] * 3))
        self._embed = programs.jit(self.decoder.extend_with_hidden, out_shardings=(everywhere, layout[:2]))
        self._pool = programs.jit(_pool_vectors, out_shardings=everywhere)
        self._put = programs.jit(self._put_rows, donate_argnums=0, out_shardings=layout)
        self._take = programs.jit(self.decoder.take_slots, static_argnames="count", out_shardings=cache)
        self._restore = programs.jit(self.decoder.put_slots, donate_argnames="caches", out_shardings=cache)
        self._draw = programs.jit(self._draw_tokens, donate_argnums=1, out_shardings=(layout, *[everywhere] * 4))

    @functools.cached_property
    def _no_bias(self) -> jax.Array:
        return self._to_logits(self.make_bias())

    def make_bias(self) -> np.ndarray:
        """Returns zeros [B, V], for `draw`."""
        return np.zeros((self.rows, self.model.config.model.padded_vocab), np.float32)

    def make_state(self, size: int) -> State:
        """Returns rows without tokens, with caches for `size` tokens."""
        return self._empty(size=size)

    def choose_chunk(self, length: int, position: int) -> int:
        """Returns the tokens of the next chunk of a context, padding included, after `position` of its tokens.

        The end of a long context is read in chunks without padding, as others can begin with these too.
        """
        left = length - position
        if (least := self.least_stored(length)) <= left < self.longest_chunk:
            return least << (left // least).bit_length() - 1
        return min(round_up_tokens(round_up(left, SMALLEST_CACHE), self._cp), self.longest_chunk)

    def least_stored(self, length: int) -> int:
        """Returns the tokens of the shortest chunk of such a context with which others can begin."""
        return self._least_at_end if length >= LONG * self.longest_chunk else self.longest_chunk

    def read(self, unstacked, state: State, chunk: Chunk, seen: np.ndarray, seen_rows: np.ndarray) -> State:
        """Reads a chunk of one row of each shard of dp; seen [dp, V] replaces what these rows have seen."""
        placed = Chunk(*map(self._to_rows, chunk))
        new = self._read(unstacked, placed, state.logits_BV, state.caches)
        return self._put(state, placed.row, new, self._to_rows(seen), self._to_rows(seen_rows))

    def score(self, unstacked, state: State, chunk: Chunk, targets: np.ndarray):
        """Reads a chunk; returns the state, the log-probabilities of its targets [dp, C] and the most likely tokens."""
        placed = Chunk(*map(self._to_rows, chunk))
        new, *results = self._score(unstacked, placed, self._to_rows(targets), *state[:2])
        return self._put_caches(state, placed, new), tuple(map(np.asarray, results))

    def embed(self, unstacked, state: State, chunk: Chunk) -> tuple[State, np.ndarray, np.ndarray]:
        """Reads a chunk; returns the state, and of the vectors of its tokens the last and the sum, [dp, d_model] each.

        The vectors are those after the last norm. To copy them all to the host would take megabytes for each chunk.
        """
        placed = Chunk(*map(self._to_rows, chunk))
        hidden_DCM, new = self._embed(unstacked, placed, *state[:2])
        last_DM, sum_DM = map(np.asarray, self._pool(hidden_DCM, self._to_all(np.asarray(chunk.count))))
        return self._put_caches(state, placed, new), last_DM, sum_DM

    def _put_caches(self, state: State, placed: Chunk, new) -> State:
        """Returns the state with new rows, whose tokens are not counted as seen."""
        nothing = np.zeros((len(placed.row), state.seen_BV.shape[1]), bool)
        outside = np.full(len(placed.row), self.rows, np.int32)
        return self._put(state, placed.row, new, *map(self._to_rows, (nothing, outside)))

    def take(self, state: State, chunk: Chunk) -> list[Cache]:
        """Returns the keys and values of a chunk that was read."""
        row, position = map(self._to_rows, (chunk.row, chunk.position))
        return self._take(row, position, state.caches, count=chunk.tokens.shape[1])

    def restore(self, state: State, row: np.ndarray, position: np.ndarray, taken: list[Cache]) -> State:
        """Puts the result of `take` into a row of a state of the same size, at the same position."""
        row_D, position_D = map(self._to_rows, (row, position))
        return state._replace(caches=self._restore(row_D, position_D, state.caches, taken))

    def draw(
        self, unstacked, state: State, draws: Draws, count: int, vocab_size: int, with_top: bool, fresh: bool,
        bias_BV: np.ndarray | None = None,
    ) -> tuple[State, Drawn]:  # fmt: skip
        """Returns the state and the results after `count` more tokens of the active rows.

        fresh: the last tokens of these rows are stored, and the state has the logits after them.
        bias_BV: what is added to the logits of each row. One program has both cases: two might round differently.
        """
        integers = np.stack([*draws[:6], draws.rules.top_k]).astype(np.int32)
        rules = draws.rules
        floats = np.stack([rules.temperature, rules.top_p, rules.min_p, rules.repetition_penalty]).astype(np.float32)
        control = np.array([count, vocab_size, with_top, fresh, bias_BV is not None], np.int32)
        bias = self._no_bias if bias_BV is None else self._to_logits(bias_BV)
        state, *results = self._draw(unstacked, state, *map(self._to_all, (integers, floats, control)), bias)
        return state, Drawn(*map(np.asarray, results))

    def _slots(self, size: int) -> list[int]:
        """Returns the slots of each cache of a row: a window's ring also has the chunk that is read.

        A ring has a multiple of the longest chunk, so that the slots of a chunk without padding are consecutive.
        """
        chunk = self.longest_chunk
        windows = [window or size for window in self.model.config.model.cache_windows]
        return [-(-min(size, -(-window // chunk) * chunk + chunk) // self._cp) * self._cp for window in windows]

    def _make_empty(self, *, size: int) -> State:
        c = self.model.config
        logits_BV = jnp.zeros((self.rows, c.model.padded_vocab), jnp.float32)

        def zeros(count, size):
            return jnp.zeros((self.rows, self.decoder.cached_heads, count, size), c.parallel.dtype)

        slots = self._slots(size)
        caches = [Cache(*[zeros(count, each) for each in c.model.cached_sizes]) for count in slots[: c.model.layers]]
        if c.model.previous_tokens:
            from shardformer.shards.previous_tokens import PreviousTokens  # not imported without them

            caches.append(PreviousTokens.make_cache(jnp.zeros((self.rows, slots[-1]), jnp.int32), c.parallel.mp))
        return State(logits_BV, caches, jnp.zeros(logits_BV.shape, bool))

    def _put_rows(self, state: State, row_D, new, seen_DV, seen_row_D) -> State:
        logits_BV, caches = self.decoder.replace_rows(row_D, state[:2], new)
        return State(logits_BV, caches, state.seen_BV.at[seen_row_D].set(seen_DV, mode="drop"))

    def _score_chunk(self, unstacked, chunk: Chunk, target_DC, logits_BV, caches):
        logits_DCV, new = self.decoder.extend_with_logits(unstacked, chunk, logits_BV, caches)
        logprobs_DCV = jax.nn.log_softmax(logits_DCV, axis=-1)
        logprob_DC = jnp.take_along_axis(logprobs_DCV, target_DC[..., None], axis=-1)[..., 0]
        top_logprobs, top_ids = lax.top_k(logprobs_DCV, self.top)
        return new, logprob_DC, top_ids, top_logprobs

    def _draw_tokens(self, unstacked, state: State, integers, floats, control, bias_BV):
        seed_B, sample_B, drawn_B, position_B, active_B, token_B, top_k_B = integers
        rules = Drawing(floats[0], top_k_B, *floats[1:])
        count, vocab_size, with_top, fresh, biased = control
        key_B = jax.vmap(lambda seed, sample: jax.random.fold_in(jax.random.key(seed, impl=THREEFRY), sample))(
            seed_B, sample_B
        )
        row_B, active_B = jnp.arange(self.rows), active_B > 0
        known_V = jnp.arange(state.logits_BV.shape[-1]) < vocab_size

        def find_top(logprobs_BV):
            logprob_BN, id_BN = lax.top_k(logprobs_BV, self.top)
            return id_BN, logprob_BN

        def skip_top(logprobs_BV):
            shape = self.rows, self.top
            return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

        def decode_one(i, token_B, logits_BV, caches):
            position = position_B + jnp.where(active_B, i - fresh, 0)
            caches = jax.tree.map(jnp.reshape, caches, cache_shapes)
            next_BV, caches = self.decoder.decode(unstacked, token_B, position, caches)
            return jnp.where(active_B[:, None], next_BV, logits_BV), drop_single_axes(caches)

        def draw_one(carry):
            i, token_B, (logits_BV, caches, seen_BV), results = carry
            # A loop of one step or none: XLA would copy the caches for a branch.
            _, logits_BV, caches = lax.while_loop(
                lambda inner: inner[0],
                lambda inner: (jnp.zeros_like(inner[0]), *decode_one(i, token_B, *inner[1:])),
                (i >= fresh, logits_BV, caches),
            )
            keys = jax.vmap(jax.random.fold_in)(key_B, drawn_B + i)
            known_BV = jnp.where(known_V[None], logits_BV, -jnp.inf)
            token_B = choose_tokens(known_BV, keys, rules, seen_BV, bias_BV, biased > 0)
            # Over all of the model's entries, as `score` and transformers do, though the tokenizer may have fewer.
            logprobs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
            top = lax.cond(with_top > 0, find_top, skip_top, logprobs_BV)
            new = token_B, logprobs_BV[row_B, token_B], *top
            seen_BV = seen_BV.at[row_B, token_B].max(active_B)
            results = tuple(x.at[:, i].set(x_new) for x, x_new in zip(results, new, strict=True))
            return i + 1, token_B, State(logits_BV, caches, seen_BV), results

        shape = self.rows, CHUNK
        results = (
            jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, self.top), jnp.int32), jnp.zeros((*shape, self.top), jnp.float32),
        )  # fmt: skip
        cache_shapes = jax.tree.map(jnp.shape, state.caches)
        state = state._replace(caches=drop_single_axes(state.caches))
        carry = jnp.int32(0), token_B, state, results
        _, _, state, results = lax.while_loop(lambda carry: carry[0] < count, draw_one, carry)
        return state._replace(caches=jax.tree.map(jnp.reshape, state.caches, cache_shapes)), *results


def _pool_vectors(hidden_DCM, count_D):
    """Returns the last and the sum of the first vectors of each chunk."""
    C = hidden_DCM.shape[1]
    last_DM = jnp.take_along_axis(hidden_DCM, count_D[:, None, None] - 1, axis=1)[:, 0]
    is_token_DC = jnp.arange(C)[None] < count_D[:, None]
    return last_DM, jnp.where(is_token_DC[..., None], hidden_DCM.astype(jnp.float32), 0).sum(axis=1)
