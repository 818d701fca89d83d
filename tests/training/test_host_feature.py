"""Features on the host: which are on, and when the loop calls them."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import pytest

from shardformer.errors import RunError, UsageError
from shardformer.training import loop
from shardformer.training.features_on_host import open_evaluation_features, open_features
from shardformer.training.host_feature import EndAtNonFinite, GoBack, HostFeature
from shardformer.training.step import StepMetrics
from shardformer.training.stop_signal import StopSignal
from tests import shared

FINITE = StepMetrics(*[1.0] * len(StepMetrics._fields))


def names(**keys) -> list[str]:
    return [type(feature).__name__ for feature in open_features(shared.tiny(**keys))]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["EndAtNonFinite"]),
        ({"skip_steps": 6.0}, ["SkippedSteps"]),
        ({"grad_metrics": True}, ["ExampleGradients", "EndAtNonFinite"]),
        ({"experts": 4, "bias": "none"}, ["ExpertLoad", "EndAtNonFinite"]),
        ({"objective": "distill", "teacher": "run"}, ["Teacher", "EndAtNonFinite"]),
        ({"objective": "orpo"}, ["EndAtNonFinite"]),
    ],
    ids=str,
)
def test_only_features_that_are_on_are_opened(keys, expected):
    assert names(**keys) == expected


@pytest.mark.parametrize("process", [0, 1])
def test_tracker_is_needed_where_it_starts(process):
    """Process 0 logs; the machines of the others need no tracker."""
    keys = {"tracker": "no_such_module:f", "coordinator": "host:1234", "processes": 2, "process_id": process}
    rejected = pytest.raises(UsageError, match="no_such_module:f cannot be imported")
    with contextlib.nullcontext() if process else rejected:
        assert names(**keys) == ["EndAtNonFinite"]


def test_monitor_opens_its_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\n")
    assert names(eval_prompts=str(tmp_path / "prompts.txt")) == ["Monitor", "EndAtNonFinite"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, []), ({"skip_steps": 6.0}, []), ({"objective": "kto"}, ["PairReferences"])],
    ids=str,
)
def test_evaluation_has_the_feature_of_the_objective(keys, expected):
    """A feature of the training alone does nothing in an evaluation."""
    assert [type(feature).__name__ for feature in open_evaluation_features(shared.tiny(**keys))] == expected


class Recorder(HostFeature):
    """Notes each call in a list that the outputs of the run share."""

    def __init__(self, calls):
        self.calls = calls

    def before_logged_step(self, state, batch, step, outputs):
        self.calls.append(f"before {step}")

    def after_step(self, row, metrics, state, outputs):
        self.calls.append(f"after {row['step']}")
        return row | {"lr": 7.0}

    def after_evaluation(self, state, step, outputs):
        self.calls.append(f"evaluated {step}")


def train(calls: list, features: tuple, steps: int = 4) -> mock.Mock:
    """Runs the loop without a model: every other step is logged, the last one is evaluated and saved."""
    config = SimpleNamespace(
        training=SimpleNamespace(steps=steps), run=SimpleNamespace(log_every=2, eval_every=steps, eval_batches=0)
    )
    trainer = mock.Mock(
        config=config, step=lambda state, *_: (calls.append("dispatched") or state, jnp.zeros(())),
        read_metrics=lambda _: FINITE, read_details=lambda _: {},
    )  # fmt: skip
    outputs = mock.MagicMock()
    outputs.checkpoints.is_due.return_value = False
    outputs.write_row.side_effect = lambda row: calls.append(f"row {row['step']} {row['lr']}")
    outputs.checkpoints.write.side_effect = lambda _, step: calls.append(f"saved {step}")
    evaluator = mock.Mock(trainer=trainer, validates=True)
    loop.TrainingLoop(evaluator, iter([{}] * steps), outputs, StopSignal(), 0, features).train(mock.Mock())
    return outputs


def test_features_are_called_in_order():
    calls = []
    train(calls, (Recorder(calls),), steps=2)
    assert calls == ["before 1", "dispatched", "before 2", "dispatched", "after 1", "row 1 7.0", "after 2",
                     "row 2 7.0", "saved 2", "evaluated 2"]  # fmt: skip


def test_only_logged_steps_are_measured():
    calls = []
    train(calls, (Recorder(calls),))
    assert [call for call in calls if call.startswith("before")] == ["before 1", "before 2", "before 4"]
    assert [call for call in calls if call.startswith("after")] == ["after 1", "after 2", "after 3", "after 4"]


def test_run_without_features_has_rows_as_they_are():
    """The negative twin: no feature has changed the row."""
    calls = []
    train(calls, (), steps=1)
    assert calls == ["dispatched", "row 1 1.0", "saved 1"]


def test_run_goes_back_as_a_feature_asks():
    restored = mock.Mock(step=1)

    class Back(HostFeature):
        asked = False

        def after_step(self, row, metrics, state, outputs):
            if not self.asked and row["step"] == 2:
                self.asked = True
                raise GoBack(2, lambda: restored)
            assert state is restored or not self.asked
            return row

    with mock.patch.object(loop, "open_outputs") as opened:
        outputs = opened.return_value.__enter__.return_value
        outputs.checkpoints.is_due.return_value = False
        config = shared.tiny(steps=3, eval_every=3)
        trainer = mock.Mock(config=config, read_metrics=lambda _: FINITE, read_details=lambda _: {})
        trainer.step = lambda state, *_: (state, jnp.zeros(()))
        evaluator = mock.MagicMock(trainer=trainer, validates=False)
        evaluator.corpus.train_batches.return_value = iter([{}])
        run = mock.Mock(config=config)
        run.read_unevaluated.return_value = None
        state = mock.MagicMock()
        state.step.__int__.return_value = 0
        loop.train(run, evaluator, iter([{}] * 3), state, mock.Mock(), StopSignal(), features=(Back(config),))
    assert evaluator.corpus.train_batches.call_args.args[1] == 2
    outputs.checkpoints.wait.assert_called_once()
    outputs.checkpoints.save_last_state.assert_not_called()


@pytest.mark.parametrize(("name", "saves"), [("loss", True), ("update_norm", False)])
def test_non_finite_metric_ends_the_run(name, saves):
    """The state is saved unless the step was applied."""
    feature, outputs = EndAtNonFinite(None), mock.Mock()
    feature.prepare(None, mock.Mock(), None, None)
    row = {"step": 3, **FINITE._replace(**{name: float("nan")})._asdict()}
    with pytest.raises(RunError, match=f"step 3: {name} is nan"):
        feature.after_step(row, None, mock.Mock(step=2), outputs)
    assert outputs.checkpoints.save_last_state.called == saves


def test_finite_row_is_unchanged():
    row = {"step": 3, **FINITE._asdict()}
    assert EndAtNonFinite(None).after_step(row, None, None, None) is row
