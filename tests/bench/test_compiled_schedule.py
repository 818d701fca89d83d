"""The table of schedules by a TPU's compiler; the compilations themselves are tested in test_ahead_of_time.py."""

import pytest

from shardformer.analysis.compiling import CompiledStep
from shardformer.analysis.wire_time import Timeline
from shardformer.bench import compiled_schedule as schedule
from shardformer.devices.chips import parse_slice
from shardformer.errors import UsageError
from shardformer.model import flops


@pytest.mark.parametrize("name", schedule.ROWS)
def test_row_has_a_valid_configuration(name):
    chip, words = schedule.ROWS[name]
    config = schedule.read_config(words)
    assert config.parallel.devices == parse_slice(chip).count


def test_row_adds_up_to_its_utilization():
    """A step of ten times the ideal time is at 10%."""
    chips, config = parse_slice("v5e:4x4"), schedule.read_config(schedule.ROWS["v5e"][1])
    ideal = config.training.batch * config.model.seq / flops.peak_tokens_per_second(config, chips.chip)
    step = CompiledStep("libtpu", 1, 3 * 10**9, 10**9, [], "", 10**6, Timeline(5 * ideal, 2 * ideal, 3 * ideal, 0))
    assert schedule.format_row("a", step, config, chips).endswith("| 10.0% |")
    assert schedule.format_row("a", step, config, chips).startswith("| a | 4.00 | 1 |")


def test_row_names_what_is_missing():
    chips, config = parse_slice("v5e:4x4"), schedule.read_config(schedule.ROWS["v5e"][1])
    assert "not printed" in schedule.format_row("a", CompiledStep("libtpu", 1, 3, 1, None), config, chips)
    refused = CompiledStep("libtpu", 1, 0, 0, None, "the compiler wants 20GiB of 15GiB")
    assert "20GiB" in schedule.format_row("a", refused, config, chips)


def test_unknown_row_is_rejected():
    with pytest.raises(UsageError, match="got 9B"):
        schedule.main(["9B"])
