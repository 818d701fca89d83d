"""The token before each token, in rows and from the slots of a cache, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer.kernels.attention import AttentionOptions, Cache, Plain
from shardformer.parallel.context import SplitContext
from shardformer.shards.previous_tokens import PreviousTokens
from tests import sharded

ROWS = np.array([[5, 3, 8, 1, 9, 2, 7, 4], [1, 6, 0, 2, 2, 8, 3, 5]], np.int32)
SLOTS = 4
STORED = 5  # tokens of the ring of slots, of which it has lost the first
PREVIOUS = PreviousTokens(2)


def find_before(cp: int, find=PREVIOUS.list_in_rows) -> list:
    """Returns the tokens before each of the rows, which are split over cp while they are looked for."""
    attention = SplitContext() if cp > 1 else Plain()

    def body(tokens_BT):
        return attention.join_rows(find(attention, attention.take_tokens(tokens_BT)))

    return sharded.on_mesh(body, (cp,), P(), [P()] * 2, axes=("cp",))(ROWS)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_tokens_before_are_found_on_other_shards(cp):
    first, second = find_before(cp)
    np.testing.assert_array_equal(first[:, 1:], ROWS[:, :-1])
    np.testing.assert_array_equal(second[:, 2:], ROWS[:, :-2])


def test_tokens_of_this_shard_only_are_noticed():
    first, _ = find_before(2, lambda _, tokens_BT: [jnp.roll(tokens_BT, 1, axis=1)] * 2)
    assert (first[:, 1:] != ROWS[:, :-1]).any()


def ring(tokens: int) -> np.ndarray:
    """Returns the slots [2, SLOTS] after this many tokens of both rows, each in the slot of its number."""
    slots = np.zeros((2, SLOTS), np.int32)
    for number in range(tokens):
        slots[:, number % SLOTS] = ROWS[:, number]
    return slots


def extend(cp: int, new: np.ndarray, stored: int | None = None) -> tuple[list, np.ndarray]:
    """Returns the tokens before each of the new ones, and the slots with them, on two shards of the model."""
    attention = SplitContext() if cp > 1 else Plain()

    def body(tokens_BT, ids_BhS1):
        options = AttentionOptions(np.int32(STORED), slot=np.int32(STORED), stored=stored)
        before, cache = PREVIOUS.extend(attention, tokens_BT, options, Cache(ids_BhS1))
        return before if stored is None else attention.join_rows(before), cache

    of_cache = P(None, "mp", "cp")
    results = [P("mp")] * 2, Cache(of_cache)
    run = sharded.on_mesh(body, (2, cp), (P(), of_cache), results, axes=("mp", "cp"))
    before, cache = run(new, np.stack([ring(STORED)] * 2, axis=1)[..., None])
    for ids in before:
        np.testing.assert_array_equal(ids[:2], ids[2:])
    np.testing.assert_array_equal(cache.k_BhSK[:, 0], cache.k_BhSK[:, 1])
    return [ids[:2] for ids in before], cache.k_BhSK[:, 0, :, 0]


@pytest.mark.parametrize("cp", [1, 2])
def test_a_token_follows_those_in_the_slots_before(cp):
    (first, second), slots = extend(cp, ROWS[:, 5:6])
    np.testing.assert_array_equal(first, ROWS[:, 4:5])
    np.testing.assert_array_equal(second, ROWS[:, 3:4])
    np.testing.assert_array_equal(slots, ring(6))


@pytest.mark.parametrize("cp", [1, 2])
def test_a_chunk_follows_the_stored_tokens(cp):
    padding = np.full((2, 1), 9, np.int32)
    (first, second), slots = extend(cp, np.concatenate([ROWS[:, 5:8], padding], axis=1), stored=3)
    np.testing.assert_array_equal(first, ROWS[:, 4:8])
    np.testing.assert_array_equal(second, ROWS[:, 3:7])
    np.testing.assert_array_equal(slots, ring(8))
