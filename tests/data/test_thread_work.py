"""Items of work in threads: all results, a progress that ends at the total, and the first error."""

import time

import pytest

from shardformer.data.thread_work import run_in_threads


def test_results_and_progress_are_complete():
    calls = []

    def work(task, number, advance):
        advance(task)
        return number, task

    result = run_in_threads(work, [5, 3, 2], 10, lambda *call: calls.append(call))
    assert sorted(result) == [(0, 5), (1, 3), (2, 2)]
    assert calls[0] == (0, 10)
    assert calls[-1] == (10, 10)
    assert all(done < 10 for done, _ in calls[:-1])


def test_ctrl_c_ends_running_items_at_their_next_progress():
    steps = []

    def work(task, number, advance):
        for _ in range(10_000):
            advance(1)
            steps.append(number)
            time.sleep(0.01)

    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_in_threads(work, [1], 10_000, interrupt, seconds_between_reports=0.02))
    assert len(steps) < 10_000


def test_error_cancels_what_has_not_started():
    started = []

    def work(task, number, advance):
        started.append(number)
        if not number:
            raise OSError("full")
        time.sleep(0.01)

    with pytest.raises(OSError, match="full"):
        list(run_in_threads(work, range(10_000), 1, lambda *_: None))
    assert len(started) < 10_000
