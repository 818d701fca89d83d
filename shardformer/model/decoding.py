"""The model's forward passes for generation: logits, and caches of keys and values. Global view."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.kernels.attention import SLOTS
from shardformer.layout import resolve
from shardformer.model.model import Model
from shardformer.model.task_on_mesh import ROWS
from shardformer.shards import CausalTransformerShard
from shardformer.shards.parameters import map_stacked


class Decoder:
    """The functions of a model that predict tokens, for sequences of any length."""

    def __init__(self, model: Model):
        config = model.config
        self.model = model
        # A layer's keys or values [B, H, S, K]: rows split over dp, heads over mp, slots over cp.
        self.cache_spec = P("dp", "mp", "cp" if config.parallel.cp > 1 else None, None)
        # Shards share a head if there are few.
        self.cached_heads = max(config.model.cached_heads, config.parallel.mp)
        self.unstacked_specs = map_stacked(
            lambda name, spec: [P(*spec[1:])] * len(config.mixture.layers_of(name)), model.specs
        )
        any_length = config.without_gradients().replace(sequence_parallel=False)
        layout = dataclasses.replace(resolve(any_length), replicas=model.replicas.for_forward_pass())
        self._shard = self._token_shard = CausalTransformerShard(layout)
        if config.experts.experts:
            from shardformer.experts import expert_layout  # not imported without experts

            layouts = expert_layout.layouts_of_generation(layout, model.layout.experts)
            self._shard, self._token_shard = map(CausalTransformerShard, layouts)

    def logits(self, params, tokens):
        """Returns float32 logits [B, T, V]: rows split over dp, vocabulary over mp; padded entries are -inf."""
        m = self.model
        return m.shard_map(self._shard.logits, (m.specs, m.row_spec), P(*m.row_spec, None, "mp"))(params, tokens)

    def prefill(self, params, tokens, lengths, end, cache_size: int):
        """Returns logits [B, V] after the first lengths[b] of each row of tokens [B, S], and the rows' caches.

        Rows are split over dp. In the caches, which are rings, every row ends just before slot `end`. A cache has
        `cache_size` slots, or as many as its layer's window if that is shorter, rounded up to a multiple of cp.
        """
        m, attention = self.model, self._shard.layout.attention
        windows = m.config.model.cache_windows

        def body(params, tokens_BS, length_B, end):
            def one(tokens_S, length):
                def align(cache, window):
                    return attention.align(cache, min(cache_size, window or cache_size), length, end)

                logits_1v, caches = self._shard.prefill(params, tokens_S[None], length)
                return logits_1v[0], [align(*each) for each in zip(caches, windows, strict=True)]

            return jax.vmap(one)(attention.take_tokens(tokens_BS), length_B)

        in_specs, out_specs = (m.specs, ROWS, ROWS, P()), (P("dp", "mp"), self.cache_spec)
        return m.shard_map(body, in_specs, out_specs)(params, tokens, lengths, end)

    def decode(self, unstacked, token, positions, caches, slot=None):
        """Returns logits [B, V] after one more token per row, and the caches with that token in `slot`.

        Each row has its position, which is also the token's slot without `slot`. `unstacked` has the parameters of
        each layer as a list.
        """

        def body(unstacked, token_B, position_B, caches, slot):
            def one(token, position, caches):
                caches = jax.tree.map(lambda x_hSK: x_hSK[None], caches)
                into = position if slot is None else slot
                logits_1v, caches = self._token_shard.decode(unstacked, token[None], position, caches, into)
                return logits_1v[0], jax.tree.map(lambda x_1hSK: x_1hSK[0], caches)

            return jax.vmap(one)(token_B, position_B, caches)

        in_specs = self.unstacked_specs, ROWS, ROWS, self.cache_spec, P()
        out_specs = P("dp", "mp"), self.cache_spec
        return self.model.shard_map(body, in_specs, out_specs)(unstacked, token, positions, caches, slot)

    def extend(self, unstacked, chunk: "Chunk", logits, caches):
        """Returns logits [D, V] and cached rows [D, ...] after a chunk of tokens of one row of each shard of dp."""

        def body(unstacked, chunk, logits_BV, caches):
            row, position, count, length = (x_D[0] for x_D in (chunk.row, chunk.position, chunk.count, chunk.length))
            local = jax.tree.map(lambda x_BhSK: lax.dynamic_slice_in_dim(x_BhSK, row, 1), caches)
            last_1V, local = self._shard.extend(unstacked, chunk.tokens, position, local, count, length)
            return jnp.where(count > 0, last_1V, lax.dynamic_slice_in_dim(logits_BV, row, 1)), local

        results = P("dp", "mp"), self.cache_spec
        in_specs = self.unstacked_specs, Chunk(*[ROWS] * 5), *results
        return self.model.shard_map(body, in_specs, results)(unstacked, chunk, logits, caches)

    def extend_with_logits(self, unstacked, chunk: "Chunk", logits, caches):
        """Returns logits [D, C, V] after each token of a chunk, and the rows of `extend` with the logits they had."""
        return self._extend_all(self._shard.extend_with_logits, P("dp", None, "mp"), unstacked, chunk, logits, caches)

    def extend_with_hidden(self, unstacked, chunk: "Chunk", logits, caches):
        """Returns float32 vectors [D, C, d_model] of each token after the last norm, and rows as above."""
        return self._extend_all(self._shard.extend_with_hidden, P("dp"), unstacked, chunk, logits, caches)

    def _extend_all(self, extend, spec, unstacked, chunk: "Chunk", logits, caches):
        def body(unstacked, chunk, logits_BV, caches):
            row, position, count, length = (x_D[0] for x_D in (chunk.row, chunk.position, chunk.count, chunk.length))
            local = jax.tree.map(lambda x_BhSK: lax.dynamic_slice_in_dim(x_BhSK, row, 1), caches)
            result_1C, local = extend(unstacked, chunk.tokens, position, local, count, length)
            return result_1C, (lax.dynamic_slice_in_dim(logits_BV, row, 1), local)

        rows = P("dp", "mp"), self.cache_spec
        in_specs = self.unstacked_specs, Chunk(*[ROWS] * 5), *rows
        return self.model.shard_map(body, in_specs, (spec, rows))(unstacked, chunk, logits, caches)

    def replace_rows(self, row, arrays, new):
        """Returns arrays [B, ...] in which one row of each shard of dp is replaced by its part of new [D, ...].

        A program of its own: XLA would copy arrays that one program both reads and replaces in part.
        """

        def body(row_D, arrays, new):
            return jax.tree.map(lambda x, x_1: lax.dynamic_update_slice_in_dim(x, x_1, row_D[0], axis=0), arrays, new)

        specs = P("dp", "mp"), self.cache_spec
        return self.model.shard_map(body, (ROWS, specs, specs), specs)(row, arrays, new)

    def take_slots(self, row, position, caches, count: int):
        """Returns the slots [D, H, count, K] of `count` tokens, from a position on, of one row of each shard of dp.

        These slots are consecutive in each cache.
        """

        def body(row_D, position_D, caches):
            def take(x_BhSK):
                sizes = 1, x_BhSK.shape[1], count, x_BhSK.shape[3]
                return lax.dynamic_slice(x_BhSK, _first_slot(row_D, position_D, x_BhSK), sizes)

            return jax.tree.map(take, caches)

        in_specs = ROWS, ROWS, self.cache_spec
        return self.model.shard_map(body, in_specs, self.cache_spec)(row, position, caches)

    def put_slots(self, row, position, caches, new):
        """Returns the caches in which the result of `take_slots` replaces the slots of its tokens."""

        def body(row_D, position_D, caches, new):
            def put(x_BhSK, new_1hsK):
                return lax.dynamic_update_slice(x_BhSK, new_1hsK, _first_slot(row_D, position_D, x_BhSK))

            return jax.tree.map(put, caches, new)

        in_specs = ROWS, ROWS, self.cache_spec, self.cache_spec
        return self.model.shard_map(body, in_specs, self.cache_spec)(row, position, caches, new)


def _first_slot(row_D, position_D, x_BhSK) -> tuple:
    return row_D[0], 0, position_D[0] % x_BhSK.shape[SLOTS], 0


class Chunk(NamedTuple):
    """Consecutive tokens of one row of each of D shards of dp."""

    tokens: Any  # [D, C]
    row: Any  # [D]: the row's index among those of its shard
    position: Any  # [D]: of the first token
    count: Any  # [D]: tokens that are not padding; 0: this shard has nothing to do
    length: Any  # [D]: tokens of the row's context
