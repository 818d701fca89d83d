"""The outputs of a run: rows, trackers, pictures and profiles."""

import io

import pytest

from shardformer import checkpoint, messages, start_messages
from shardformer.devices import chips
from shardformer.logs import curves, metrics_file
from shardformer.logs.observers import Observers
from shardformer.logs.progress import Progress
from shardformer.logs.step_profiler import StepProfiler
from shardformer.logs.throughput import Throughput
from shardformer.model import flops
from shardformer.training import outputs
from shardformer.training.checkpoint_progress import Best
from tests import runs, shared
from tests.surroundings import let_fail, note_texts
from tests.training.test_saving import make_checkpoints
from tests.training.uneven_run import plain_words


@pytest.mark.slow
def test_unreadable_records_are_reported_to_all_processes(tmp_path, text, monkeypatch, capsys):
    """A process that continued would wait for this one for ever."""
    out = tmp_path / "run"
    words = plain_words(text)
    assert runs.train(*words, f"out={out}", "steps=2") == 0
    (out / "metrics.csv").write_text("damaged\n")
    told = note_texts(monkeypatch)
    assert runs.train("--resume", out, "steps=4") == 1
    assert [words for words in told if "metrics.csv has unknown columns" in words]
    assert f"{out}/metrics.csv has unknown columns: got 'damaged'" in capsys.readouterr().err


def test_gradients_file_needs_grad_metrics(tmp_path, text, monkeypatch):
    logged: list[dict] = []
    monkeypatch.setattr(messages, "log_step", logged.append)
    assert runs.train(*plain_words(text), f"out={tmp_path}/run", "steps=2") == 0
    assert [row["step"] for row in logged] == metrics_file.read_metrics(tmp_path / "run")["step"] != []
    assert (tmp_path / "run/metrics.csv").exists()
    assert not (tmp_path / "run/gradients.csv").exists()


def test_silenced_run_shows_no_table():
    def make_progress():
        return outputs._make_progress(shared.tiny(), 0, 0.0, Best(), None, ())

    assert isinstance(make_progress(), Progress)
    with messages.silence():
        assert not isinstance(make_progress(), Progress)


def test_the_first_rounded_loss_is_shown_as_the_best(tmp_path):
    stream = io.StringIO()
    checkpoints = make_checkpoints(tmp_path, quantize_aware="nf4", steps=8)  # rounds after step 6
    with Observers() as observers, Progress(8, 0, 128, stream=stream) as shown:
        written = outputs.Outputs(
            metrics=None,
            progress=shown,
            observers=observers,
            profiler=StepProfiler(None, tmp_path),
            checkpoints=checkpoints,
            throughput=Throughput(128, 0, 0.0),
            peak_speed=None,
        )
        for step, loss in [(4, 1.0), (5, 1.5), (6, 2.0), (7, 2.5)]:
            checkpoints.update_best(step, loss)
            written.write_row({"step": step, "loss": loss, "val_loss": loss})
    assert [line.endswith(" best") for line in stream.getvalue().splitlines()[2:]] == [True, False, True, False]


TRACKERS = []


class Tracker:
    """The object that `tracker=tests.training.test_outputs:Tracker` makes."""

    def __init__(self, settings):
        self.settings, self.rows = settings, []
        TRACKERS.append(self)

    def write(self, row):
        self.rows.append(row)
        raise OSError("no route to the tracker")

    def close(self):
        self.closed = True


@pytest.mark.slow
def test_run_reports_to_a_tracker_and_traces_steps(tmp_path, text, capsys, monkeypatch):
    out = tmp_path / "run"
    for module in (outputs, start_messages):  # a chip whose peak is known
        monkeypatch.setattr(module, "find_chip", lambda _: chips.CHIPS["v5e"])
    words = (*plain_words(text), "steps=4", f"out={out}", "profile=2:3")
    assert runs.train(*words, "tracker=tests.training.test_outputs:Tracker") == 0
    (tracker,) = TRACKERS
    assert tracker.closed
    assert tracker.settings["steps"] == 4
    assert [row["step"] for row in tracker.rows] == [1, 2, 3, 4]
    assert all(row["peak_bytes"] > 10**8 for row in tracker.rows)  # of this process, as CPU devices do not tell
    full_speed = 8 * 197e12 / flops.flops_per_token(checkpoint.read_config(out))
    measured = [row for row in tracker.rows if row["tokens_per_s"]]
    assert measured
    assert [row["mfu"] for row in measured] == [row["tokens_per_s"] / full_speed for row in measured]
    assert metrics_file.read_metrics(out)["mfu"][-1] == measured[-1]["mfu"]
    said = capsys.readouterr().out
    assert "MFU 1 would be" in said
    assert said.count("Tracker failed: no route to the tracker; training continues") == 1
    assert f"profile: the trace up to step 3 is in {out}/profile" in said
    assert list(out.glob("profile/**/*.xplane.pb"))
    kept = (out / "config.json").read_text()
    assert '"tracker"' not in kept
    (out / "config.json").write_text(kept.replace("{", '{"tracker": "os:abort", "profile": "1:2",', 1))
    assert checkpoint.read_config(out).start.tracker == ""  # somebody else's run folder must not run code


def test_observer_failure_does_not_stop_training(tmp_path, text, monkeypatch, capsys):
    """A folder whose name is a broken formula to matplotlib and not UTF-8, a drawing and events that fail."""
    words = (*plain_words(text), "steps=2")
    out = tmp_path / b"$x_{$ caf\xe9".decode("utf-8", "surrogateescape")
    with monkeypatch.context() as patch:
        patch.setattr(
            messages.log, "handlers", messages.log.handlers[:1]
        )  # pytest's cannot report a name that is not UTF-8
        assert runs.train(*words, f"out={out}", curves=True) == 0
    assert (out / "final.json").exists()
    assert (out / "curves.png").exists()
    assert list((out / "tensorboard").iterdir())
    capsys.readouterr()
    let_fail(monkeypatch, curves, "draw_curves", ValueError("ParseException"))
    let_fail(monkeypatch, outputs, "TensorBoardEvents", ValueError("ParseException"))
    assert runs.train(*words, f"out={tmp_path}/run", curves=True) == 0
    said = capsys.readouterr().out
    assert "TensorBoard did not start: ParseException; training continues\n" in said
    assert "curves.png was not drawn: ParseException\n" in said
    assert (tmp_path / "run/final.json").exists()
