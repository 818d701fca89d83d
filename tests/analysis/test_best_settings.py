"""Mesh, zero, remat and accum that are chosen together for chips that are not available."""

import pytest

from shardformer.__main__ import main
from shardformer.analysis import best_settings, memory, plan, roofline, traced
from shardformer.cli import plan_command
from shardformer.cli.analysis_options import PlanOptions
from shardformer.config.presets import preset
from shardformer.devices import chips
from shardformer.layout import specs
from tests import runs, shared

EIGHT = chips.parse_slice("h100:8")
LLAMA = {
    "activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": "none", "tied": False, "dropout": 0.0,
    "vocab": 32_000, "seq": 8192, "dtype": "bfloat16", "mesh": "auto",
}  # fmt: skip
OF_7B = {"layers": 32, "d_model": 4096, "heads": 32, "d_ff": 11_008, "batch": 64}


def with_memory(count: int) -> chips.Slice:
    return chips.Slice("h100", EIGHT.chip._replace(memory=count), (8,))


def silent(_: str) -> None:
    """Shows no setting that is tried."""


@pytest.fixture(scope="module")
def best():
    """The plans of tiny on chips with less memory than its state and activations need."""
    return best_settings.choose(shared.tiny(mesh="auto", batch=64), with_memory(400_000), best_settings.CHOSEN, silent)


@pytest.mark.slow
def test_best_settings_fit_and_are_sorted_by_time(best):
    assert 1 <= len(best) <= best_settings.BEST
    assert all(each.estimate <= 400_000 for each in best)
    seconds = [each.forecast for each in best]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_no_setting_that_fits_is_faster_than_the_best():
    config, slice_ = shared.tiny(mesh="auto", batch=64, remat="dots", accum=2), with_memory(800_000)
    result = best_settings.choose(config, slice_, ("zero",), silent)
    plans = [plan.estimate(each.config, slice_) for each in best_settings.list_candidates(config, slice_, ("zero",))]
    seconds = [each.times.seconds for each in plans if each.estimate <= 800_000 / plan.MARGIN]
    assert 0 < len(seconds) < len(plans)
    assert min(each.times.seconds for each in result) <= min(seconds)


def test_time_is_estimated_only_of_settings_that_fit(monkeypatch):
    """The time needs a second trace, so a search over settings that do not fit takes half as long without it."""
    temporaries = iter([9_000_000, 100_000, 100_000])
    timed = []

    def estimate(config, chips):
        timed.append(config)
        return plan.Plan(config, chips, memory.predict_bytes(config), 100_000, [], roofline.Roofline(1, 0, 0, 0))

    monkeypatch.setattr(plan, "estimate_temporaries", lambda *_: next(temporaries, 9_000_000))
    monkeypatch.setattr(plan, "estimate", estimate)
    shown = []
    config = shared.tiny(mesh="auto", batch=64, remat="none", accum=1)
    result = best_settings.choose(config, with_memory(9_000_000), ("zero",), shown.append)
    assert len(shown) > len(timed) == 2
    assert {each.config for each in result} <= set(timed)


@pytest.mark.slow
def test_settings_without_a_choice_do_not_fit(best):
    """The negative twin: with the mesh alone, nothing fits."""
    config = shared.tiny(mesh="auto", batch=64)
    assert not plan.estimate(plan.resolve(config, with_memory(400_000)), with_memory(400_000)).fits
    assert any(each.config.parallel.zero or each.config.training.accum > 1 for each in best)


def test_given_keys_stay():
    config = shared.tiny(mesh="auto", batch=64, remat="full", accum=2)
    listed = [each.config for each in best_settings.list_candidates(config, EIGHT, ("zero",))]
    assert {(each.parallel.remat, each.training.accum) for each in listed} == {("full", 2)}
    assert {each.parallel.zero for each in listed} == {0, 1, 3}


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(("mesh", "zero"), [("8x1", 0), ("2x4", 0), ("4x2", 1)])
def test_bounds_are_below_the_estimate(mesh, zero, remat):
    config = shared.tiny(mesh=mesh, remat=remat, zero=zero, batch=64, layers=4)
    estimated = plan.estimate(config, EIGHT)
    assert best_settings.bound_activations(config) < estimated.temporaries
    assert best_settings.bound_gradients(config) < estimated.temporaries
    assert best_settings.bound_seconds(config, EIGHT) <= estimated.times.seconds * 1.001


@pytest.mark.slow
def test_large_model_gets_settings_that_fit():
    slice_, config = chips.parse_slice("v5e:4x8"), preset("gpt1").replace(**LLAMA | OF_7B)
    result = best_settings.choose(config, slice_, best_settings.CHOSEN, silent)
    assert len(result) == best_settings.BEST
    assert all(each.fits and each.config.parallel.devices == slice_.count for each in result)
    best = result[0]
    assert best.utilization * best.forecast / best.times.seconds > 0.5  # at the chip's peak rates
    assert best.utilization > 0.4
    assert len({(each.config.parallel.mesh, each.estimate, each.times) for each in result}) == len(result)


def test_unscattered_gradients_of_zero1_are_a_bound():
    """Few rows: the gradients need more than the activations, and a device keeps an eighth of them."""
    config = shared.tiny(mesh="8x1", zero=1, batch=8, d_model=64)
    bound, full = best_settings.bound_gradients(config), memory.predict_bytes(config.replace(zero=0)).gradients
    assert full / 2 < bound < full
    assert bound <= plan.estimate(config, EIGHT).temporaries
    assert best_settings.bound_gradients(config.replace(zero=3)) == 0


def test_bound_counts_the_gradients_of_a_further_layer():
    """zero=0 sends all of them twice, zero=1 once."""
    config = shared.tiny(mesh="8x1", objective="mtp")
    none, one = (best_settings.bound_seconds(config.replace(zero=zero), EIGHT) for zero in (0, 1))
    sent = 4 * specs.count_parameters(traced.make_trainer(config).model.shapes) * 7 / 8
    assert none - one == pytest.approx(sent / roofline.axis_bandwidth("dp", config, EIGHT))


def test_budget_is_tokens_over_speed_and_all_chips():
    estimated = plan.estimate(shared.tiny(mesh="8x1"), EIGHT)
    tokens = estimated.tokens_per_second * 3600 * 48
    assert best_settings.measure_budget(estimated, tokens, 2.0) == (pytest.approx(2), pytest.approx(48 * 8 * 2))
    assert best_settings.measure_budget(estimated, tokens, None)[1] is None


def test_command_prints_settings_days_and_cost(capsys):
    words = ["plan", "tiny", "chip=h100:8", "compiler=none", "vocab=64", "batch=64", "tokens=1e9", "price=2.5"]
    assert main(words) == 0
    assert "1e+09 tokens take " in (printed := capsys.readouterr().out)
    assert ", at 2.5 for a chip and hour" in printed


@pytest.mark.parametrize(
    ("word", "message"),
    [("tokens=0", "tokens must be above 0, or none, got 0.0"), ("price=2", "give tokens= as well")],
)
def test_wrong_budget_is_rejected(word, message, capsys):
    assert main(["plan", "tiny", "chip=h100:8", word]) == runs.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("given", "zero"), [(set(), 0), ({"zero"}, 3)])
def test_zero_of_a_preset_is_not_planned_for_one_chip(given, zero):
    """`plan llama3_8b chip=h100:1` rejected the preset's own zero=3, instead of saying what would fit."""
    small = chips.Slice("h100", EIGHT.chip._replace(memory=1000), (1,))
    config = shared.tiny(mesh="auto", zero=3)
    chosen = plan_command._choose_settings(config, small, PlanOptions(), given)
    assert (chosen.parallel.mesh, chosen.parallel.zero) == ("1x1", zero)
