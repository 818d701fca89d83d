"""The tour: every way computes the same, and costs what it says."""

import pytest

from shardformer.analysis import explain, pictures
from shardformer.analysis.verify import Difference
from shardformer.cli.explain_command import format_stop


@pytest.fixture(scope="module")
def stops():
    return {stop.title: stop for stop in explain.tour()}


@pytest.fixture(scope="module")
def zero(stops):
    return stops["ZeRO"]


@pytest.mark.slow
def test_every_way_equals_the_dense_model(stops):
    assert list(stops) == list(explain.STOPS)
    for stop in stops.values():
        assert all(row.passes for row in stop.differences)
        assert "equal to dense" in format_stop(stop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gradient", "loss", "worst"),
    [(2e-7, 3e-7, "3e-07 (loss)"), (float("nan"), 3e-7, "nan (q)"), (4e-7, float("nan"), "nan (loss)")],
)
def test_the_worst_may_be_the_loss(zero, gradient, loss, worst):
    differences = [Difference("o", 1e-7, 1e-5), Difference("q", gradient, 1e-5), Difference("loss", loss, 1e-6)]
    shown = format_stop(zero._replace(differences=differences))
    assert f"the worst of the loss and 2 gradients is off by {worst}" in shown


@pytest.mark.slow
def test_scatter_bytes_are_those_that_a_device_sends(zero):
    """A device sends three quarters of the model: it keeps one quarter."""
    own = zero.stored.gradients
    _, sent = zero.sent["reduce-scatter", "dp"]
    assert sent == pytest.approx((explain.DEVICES - 1) * own, rel=0.02)
    assert "bytes sent by one device" in format_stop(zero)


@pytest.mark.slow
def test_each_split_sends_its_collectives(stops):
    kinds = {title: set(stop.sent) for title, stop in stops.items()}
    assert kinds["dense"] == set()
    assert kinds["data parallel"] == {("all-reduce", "dp")}
    assert kinds["tensor parallel"] == {("all-reduce", "mp")}
    assert kinds["ZeRO"] >= {("all-gather", "dp"), ("reduce-scatter", "dp")}
    assert kinds["context parallel"] == {("all-reduce", "dp cp"), ("collective-permute", "cp")}
    assert kinds["both"] == {("all-reduce", "dp"), ("all-reduce", "mp")}
    assert kinds["experts"] == {("all-gather", "dp"), ("reduce-scatter", "dp"), ("all-reduce", "dp"),
                                ("all-reduce", "mp")}  # fmt: skip
    over_all_rows = ("all-reduce", "dp pp")  # the losses, and the gradients outside the layers
    assert kinds["pipeline"] == {("all-reduce", "dp"), over_all_rows, ("collective-permute", "pp")}


@pytest.mark.slow
def test_each_split_divides_its_arrays(stops):
    whole = stops["dense"].stored
    assert stops["data parallel"].stored == whole
    assert stops["ZeRO"].stored.total * explain.DEVICES == pytest.approx(whole.total, rel=1e-3)
    assert whole.total / 4 < stops["tensor parallel"].stored.total < whole.total / 3.5  # norms stay whole


@pytest.mark.slow
def test_each_device_has_the_tokens_of_its_experts(stops, tmp_path):
    stop = stops["experts"]
    routes, config = stop.routes, stop.config
    assert [len(devices) for devices in routes.devices_E] == [1] * 8
    assert (routes.count_LE.sum(1) == 2 * config.training.batch * config.model.seq).all()
    shares = [routes.share_of_device(device) for device in range(explain.DEVICES)]
    assert sum(shares) == pytest.approx(1)
    assert "busiest expert" in format_stop(stop)
    pictures.draw_routes(routes, tmp_path / "routes.png")
    assert (tmp_path / "routes.png").stat().st_size > 10_000
    assert stops["dense"].routes is None
