"""Orders are permutations, differ by seed and epoch, and any position costs the same."""

import time

import numpy as np
import pytest

from shardformer.data.order import Mixture, epoch_order, epoch_shift, permute, random_draws


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097, 100_003])
def test_a_permutation_of_any_size(size):
    found = permute(np.arange(size), size, key=5)
    assert np.array_equal(np.sort(found), np.arange(size))
    if size > 100:
        other = permute(np.arange(size), size, key=6)
        assert not np.array_equal(found, other)
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.15
        assert np.mean(np.abs(np.diff(found))) / size == pytest.approx(1 / 3, abs=0.05)  # as of a random order


def test_every_epoch_is_a_permutation_of_its_own():
    epochs, index = epoch_order(np.arange(3 * 100), 100, seed=1)
    assert np.array_equal(epochs, np.repeat([0, 1, 2], 100))
    orders = index.reshape(3, 100)
    assert all(np.array_equal(np.sort(order), np.arange(100)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], epoch_order(np.arange(100), 100, seed=2)[1])


def test_a_position_does_not_depend_on_those_asked_with_it():
    together = epoch_order(np.arange(500), 77, seed=3)[1]
    alone = [int(epoch_order(np.array([position]), 77, seed=3)[1][0]) for position in range(500)]
    assert together.tolist() == alone


def test_the_golden_order():
    """A run resumed under another numpy reads on where it stopped."""
    assert epoch_order(np.arange(8), 1000, seed=0)[1].tolist() == [858, 283, 397, 943, 424, 640, 583, 611]
    assert random_draws(np.arange(4), 1000, seed=0).tolist() == [824, 563, 915, 962]
    assert Mixture([3, 1], seed=0).locate(np.arange(8))[0].tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    assert epoch_shift(np.arange(6), 100, seed=0).tolist() == [29, 10, 67, 47, 72, 35]
    assert epoch_shift(np.arange(6), 100, seed=1).tolist() == [48, 62, 86, 55, 55, 90]


def test_far_positions_cost_no_more():
    def seconds(first: int) -> float:
        began = time.process_time()
        for step in range(20):
            epoch_order(np.arange(16) + first + 16 * step, 300_000, seed=0)
        return time.process_time() - began

    seconds(0)
    assert seconds(16 * 10**9) < 5 * seconds(0) + 0.05


def test_shifts_use_all_of_the_slack():
    shifts = epoch_shift(np.arange(1000), 3, seed=0)
    assert set(shifts.tolist()) == {0, 1, 2, 3}
    assert set(epoch_shift(np.arange(10), 0, seed=0).tolist()) == {0}


@pytest.mark.parametrize("weights", [[3, 1], [0.5, 0.25, 0.25], [1, 1, 1], [0.7, 0.29, 0.01], [1e-9, 1.0]])
def test_a_mixture_has_its_weights_and_reads_each_source_in_turn(weights):
    mixture = Mixture(weights, seed=4)
    positions = np.arange(3 * mixture.length)
    sources, ranks = mixture.locate(positions)
    for source, weight in enumerate(weights):
        found = np.sort(ranks[sources == source])
        assert np.array_equal(found, np.arange(len(found)))  # none left out, none twice
        assert len(found) / len(positions) == pytest.approx(weight / sum(weights), abs=1 / mixture.length)
    again = [mixture.locate(np.array([position])) for position in positions[:50]]
    assert [int(source[0]) for source, _ in again] == sources[:50].tolist()


@pytest.mark.parametrize(
    ("weights", "counts"),
    [  # by hand: 4,096 places, the remainder to the largest fractions
        ([1, 1, 1], [1, 1, 1]),
        ([0.7, 0.29, 0.01], [2867, 1188, 41]),  # 2867.2, 1187.84, 40.96
        ([2.5, 1.5], [5, 3]),
        ([10**6, 1, 3], [4096, 1, 1]),  # each is at least 1
        ([1.1, 2.2, 3.3], [683, 1365, 2048]),  # 682.67, 1365.33, 2048
    ],
)
def test_remainders_go_to_the_largest_fractions(weights, counts):
    assert Mixture(weights, seed=0).counts.tolist() == counts


@pytest.mark.parametrize("weights", [[1e-12, 1.0], [1.0, 1e-12], [1, 10**9, 1]])
def test_every_source_of_a_mixture_is_read(weights):
    mixture = Mixture(weights, seed=1)
    sources, _ = mixture.locate(np.arange(mixture.length))
    assert set(sources.tolist()) == set(range(len(weights)))


def test_rows_of_a_mixture_come_once_in_whole_patterns_only():
    """A source of 7 rows in patterns of 8 of its rows: each pattern reads across the border of an epoch."""
    weights = [8, 4087]
    mixture = Mixture(weights, seed=3)
    sources, ranks = mixture.locate(np.arange(7 * mixture.length))
    rows = ranks[sources == 0] % 7
    assert np.bincount(rows).tolist() == [8] * 7  # over 7 patterns each row comes as often as any other
    first = [len(set(rows[n * 7 : n * 7 + 7].tolist())) for n in range(8)]
    assert min(first) < 7  # and in 7 readings in a row it need not come at all


def test_mixed_patterns_are_shuffled():
    sources, _ = Mixture([1, 1], seed=0).locate(np.arange(200))
    assert 60 < np.count_nonzero(np.diff(sources)) < 190
