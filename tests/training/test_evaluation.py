"""The loss of splits, where some have nothing that counts."""

import math
from types import SimpleNamespace

import numpy as np

from shardformer.training import evaluation
from shardformer.training.evaluation import Evaluation, Evaluator
from tests import shared


class Batches:
    """One batch of a split, which holds the sums."""

    def __init__(self, sums):
        self._sums = sums

    def gather(self, rows):
        return iter([np.array(self._sums, float)])

    def __len__(self):
        return 1


def test_split_without_a_counted_target_has_no_loss():
    """Such as a few batches of long prompts with mask_prompt. The joint loss leaves the split out."""
    sums = {"validation": [0, 0, 0, 0], "test": [4, 8, 1, 16]}
    corpus = SimpleNamespace(eval_batches=lambda split, config, limit: Batches(sums[split]))
    trainer = SimpleNamespace(config=None, local_rows=None, sums=lambda params, batch: batch)
    found = Evaluator(trainer, corpus).evaluate_splits(("validation", "test"), None)
    assert math.isnan(found["validation"].loss)
    assert found["validation + test"] == found["test"] == Evaluation(2.0, 0.25, 4, 16)
    sums["test"] = sums["validation"]
    assert math.isnan(Evaluator(trainer, corpus).evaluate_splits(("validation", "test"), None)["test"].loss)


def test_metrics_of_a_task_are_means_over_all_rows():
    splits = [Evaluation(1.0, math.nan, 1, 0, {"rmse": 4.0}), Evaluation(3.0, math.nan, 3, 0, {"rmse": 8.0})]
    joined = evaluation._join(splits)
    assert joined.to_record("rows") == {"loss": 2.5, "rows": 4, "rmse": 7.0}
    table = evaluation.format_losses({"all": joined}, shared.tiny())
    assert table.split() == ["split", "nats/token", "tokens", "rmse", "all", "2.5000", "4", "7"]


def test_evaluation_without_tokens_has_no_nan_in_its_record():
    assert Evaluation(math.nan, math.nan, 0).to_record() == {"tokens": 0}
