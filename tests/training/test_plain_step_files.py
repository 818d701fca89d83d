"""The files whose code runs while a step of `tiny` is traced: few for a plain step, and few more for each feature."""

import functools
import json
import subprocess
import sys

import pytest

from tests.launch import ROOT

MOST = 19  # and trainer.py, which calls the traced program
MOST_OF_A_FEATURE = 3
PLAIN = {
    "config/names.py",
    "kernels/activations.py",
    "kernels/attention.py",
    "kernels/linear.py",
    "kernels/rotary.py",
    "kernels/vocabulary_loss.py",
    "model/model.py",
    "model/task_on_mesh.py",
    "optim/chain.py",
    "optim/schedule.py",
    "collectives.py",
    "parallel/replicas.py",
    "shards/embedding.py",
    "shards/layer.py",
    "shards/norm.py",
    "shards/parameters.py",
    "shards/projection.py",
    "shards/transformer.py",
    "training/step.py",
}
EXPERTS = {"experts": 4, "bias": "none", "balance_loss": 0.01, "router_z_loss": 0.01}
BALANCED = EXPERTS | {"balance_rate": 0.001}
MIXED = EXPERTS | {"dense_first": 1}
MASTERS = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
CODES = {"quantize_aware": "int8"}
BASES = ((BALANCED, EXPERTS), (MIXED, EXPERTS), (CODES, MASTERS))  # features that stand on another
FEATURES = (
    {"ema": 0.9},
    {"lr_rules": "bias=10x,embed=frozen"},
    MASTERS,
    CODES,
    {"moment_dtype": "bfloat16"},
    {"offload": "optimizer"},
    {"skip_steps": 6.0},
    {"accum": 2},
    {"accum": 2, "accum_mode": "multisteps"},
    {"accum": 2, "accum_mode": "manual"},
    {"optimizer": "muon"},
    {"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0},
    {"zero": 1},
    {"zero": 3},
    {"remat": "full"},
    {"dropout": 0.1},
    {"lora_rank": 2},
    {"objective": "dpo"},
    {"objective": "grpo", "answer_tokens": 4},
    {"window": 8},
    {"attention": "blocks"},
    {"loss_chunk": 32},
    {"kv_heads": 1},
    {"positions": "learned"},
    {"positions": "alibi"},
    {"activation": "swiglu"},
    {"tied": True},
    {"residual_scale": 0.5},
    {"scale": "completep:16x1"},
    {"window_pattern": "fn"},
    EXPERTS,
    {"mesh": "dp2.cp2.mp2"},
    {"mesh": "2x2x2", "accum": 2},
    BALANCED,
    MIXED,
)
ONE_DEVICE = {"mesh": "1x1"}


def find_files(configs: list[dict]) -> list[set[str]]:
    """Returns the files of the step of each configuration."""
    command = [sys.executable, "-m", "tests.training.run_files", json.dumps(configs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(files) for files in json.loads(done.stdout.splitlines()[-1])]


@functools.cache
def files_of_features() -> list[set[str]]:
    """Returns those of each feature, and of one device, from one process."""
    return find_files([{"mesh": "4x2"} | feature for feature in (*FEATURES, ONE_DEVICE)])


def test_plain_step_runs_few_files():
    assert find_files([{"mesh": "4x2"}]) == [PLAIN]
    assert len(PLAIN) <= MOST


@pytest.mark.slow
def test_one_device_runs_the_same_files():
    assert files_of_features()[-1] == PLAIN


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(FEATURES)), ids=map(str, FEATURES))
def test_feature_adds_few_files(index):
    base = next((base for feature, base in BASES if feature == FEATURES[index]), None)
    without = files_of_features()[FEATURES.index(base)] if base else PLAIN
    more = files_of_features()[index] - without
    assert len(more) <= MOST_OF_A_FEATURE, more


@pytest.mark.slow
def test_feature_runs_files_of_its_own():
    """The negative twin: the trace sees a feature that is on."""
    assert "optim/average.py" in files_of_features()[FEATURES.index({"ema": 0.9})]
