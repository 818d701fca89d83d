"""A key of experts, adapters, the optimizer or the training changes the program of a step, or is rejected."""

import functools
import re

import jax
import numpy as np
import pytest

from shardformer.adapters.adapter_keys import AdapterKeys
from shardformer.analysis import traced
from shardformer.config import Config
from shardformer.config.keys import keys_of
from shardformer.config.optimizer_keys import OptimizerKeys
from shardformer.config.parsing import choices, plain_type
from shardformer.config.training_keys import BadStepKeys, TrainingKeys
from shardformer.errors import UsageError
from shardformer.experts.expert_keys import ExpertKeys
from tests import shared

SIZES = {"mesh": "1x1", "batch": 4, "layers": 2, "d_model": 16, "heads": 2, "d_ff": 16, "seq": 16, "experts": 0}
EXPERTS = {"experts": 4, "bias": "none"}
FEATURES = {  # keys that switch a feature on, and the groups whose keys it reads
    "training": ({}, (TrainingKeys, BadStepKeys, OptimizerKeys)),
    "experts": (EXPERTS | {"shared_width": 8}, (ExpertKeys,)),
    "adapters": ({"lora_rank": 2}, (AdapterKeys, OptimizerKeys)),
    "adapters of experts": (EXPERTS | {"lora_rank": 2, "lora_targets": "q,expert_up"}, (AdapterKeys, ExpertKeys)),
    "muon": ({"optimizer": "muon"}, (OptimizerKeys,)),
    "lbfgs": ({"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0}, (OptimizerKeys,)),
}
VALUES = {"lr_rules": "embed=10x", "lora_targets": "q", "expert_pattern": "de", "batch": 8, "accum": 2, "ema": 0.5,
          "skip_steps": 3.0, "decay": 5, "dropout": 0.1, "lora_dropout": 0.1, "experts": 2,
          "experts_per_token": 1, "expert_width": 8}  # fmt: skip
# Keys of the host or of another program, and one that only splits arrays.
ELSEWHERE = {"base", "seed", "grad_metrics", "expert_axes"}
STEPS_OF_THE_RATE = {"lbfgs": {"steps"}}  # which has no schedule
CASES = [
    (feature, name)
    for feature, (_, groups) in FEATURES.items()
    for group in groups
    for name in keys_of(group)
    if name not in FEATURES[feature][0] and name not in ELSEWHERE | STEPS_OF_THE_RATE.get(feature, set())
]


def other_value(config: Config, name: str):
    if name in VALUES:
        return VALUES[name]
    value, kind = config.get(name), plain_type(keys_of(Config)[name].type)
    if known := choices(keys_of(Config)[name]):
        return next(choice for choice in known if choice != value)
    if kind is bool:
        return not value
    return kind((value or 0) / 2 + 0.25 if kind is float else (value or 0) + 1)


@functools.cache
def trace_step(config: Config) -> tuple[str, str]:
    """Returns the text of the programs of a step, and the types of its state."""
    trainer = traced.make_trainer(config)
    program = jax.make_jaxpr(trainer.accumulation.step)(trainer.abstract, trainer.model.batch_shapes(), np.int32(0))
    return re.sub(r"0x[0-9a-f]+", "", str(program)), str(trainer.abstract)  # without addresses of functions


def trace_changed(config: Config, name: str) -> tuple[str, str] | str:
    """Returns what `trace_step` returns with another value of a key, or the message that rejects it."""
    try:
        return trace_step(config.override({name: other_value(config, name)}))
    except UsageError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "name"), CASES)
def test_accepted_key_changes_the_step(feature, name):
    config = shared.tiny(**SIZES | FEATURES[feature][0])
    result = trace_changed(config, name)
    assert name in result if isinstance(result, str) else result != trace_step(config)


@pytest.mark.slow
def test_key_that_a_feature_forgets_is_noticed(broken):
    broken(AdapterKeys, "adapter_scale", lambda self, matrix: 2.0)
    config = shared.tiny(**SIZES, lora_rank=2, seed=1)
    assert trace_step(config.override({"lora_alpha": 3.0})) == trace_step(config)
