"""A key that may be given with an objective changes its gradient or its batches; otherwise the key is rejected."""

import functools
import re

import jax
import pytest

from shardformer.analysis import traced
from shardformer.config import Config
from shardformer.config.keys import keys_of
from shardformer.data.corpus import choose_row_layout
from shardformer.errors import UsageError
from shardformer.exact import jaxprs
from shardformer.experts import expert_layer
from shardformer.objectives.objective_keys import ObjectiveKeys
from tests import shared

SIZES = {"mesh": "1x1", "batch": 4, "layers": 1, "d_model": 16, "heads": 2, "d_ff": 16, "seq": 16}
EXPERTS = {"experts": 4, "bias": "none"}
OBJECTIVES = {
    "lm": {},
    "distill": {"distill_weight": 0.5},
    "grpo": {"group_size": 2, "answer_tokens": 4, "rollout_steps": 2},
    **{name: {} for name in ("dpo", "ipo", "kto", "orpo", "simpo", "reward", "mtp")},
}
# Another value of each key that acts through the objective, and the keys without which none acts.
VALUES = {
    "beta": 0.3, "label_smoothing": 0.2, "length_norm": True, "reward_gap": 0.7, "sft_weight": 0.3, "sft_tokens": "all",
    "divergence": "reverse", "distill_weight": 0.3, "distill_temperature": 2.0, "group_size": 4, "answer_tokens": 5,
    "clip_ratio": 0.1, "z_loss": 0.1, "dropout": 0.1, "lora_dropout": 0.1, "balance_loss": 0.1, "router_z_loss": 0.1,
    "balance_rate": 0.1, "reward_center": 0.1, "mtp_weight": 0.1,
}  # fmt: skip
OTHERS = {"lora_dropout": {"lora_rank": 2}} | dict.fromkeys(("balance_loss", "router_z_loss", "balance_rate"), EXPERTS)
# Keys of the host's code; test_rollouts.py and test_teacher.py test them.
OF_THE_HOST = {"rollout_steps", "rollout_top_k", "rollout_top_p", "token_mean", "teacher"}
PAIRS = {"dpo", "ipo", "kto", "orpo", "simpo"}
WITHOUT_REWARDS = set(OBJECTIVES) - {"grpo"}  # whose sampler drops nothing
ACCEPTED = {  # the objectives with which a key may be given; all with any other key
    "beta": PAIRS | {"grpo"}, "label_smoothing": {"dpo", "simpo"}, "length_norm": {"dpo"}, "reward_gap": {"simpo"},
    "sft_weight": PAIRS, "sft_tokens": {"orpo"}, "divergence": {"distill"}, "distill_weight": {"distill"},
    "distill_temperature": {"distill"}, "group_size": {"grpo"}, "answer_tokens": {"grpo"}, "clip_ratio": {"grpo"},
    "dropout": WITHOUT_REWARDS, "lora_dropout": WITHOUT_REWARDS, "reward_center": {"reward"},
    "mtp_weight": {"mtp"},
    "z_loss": set(OBJECTIVES) - {"reward"},
}  # fmt: skip
CASES = [(objective, name) for name in VALUES for objective in OBJECTIVES]
for name in ("reward", "mtp"):  # which reject all adapters
    CASES.remove((name, "lora_dropout"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.json").write_text(shared.tiny(**SIZES).to_json())
    return str(folder)


def make_config(objective: str, teacher: str, **changes) -> Config:
    of_teacher = {"teacher": teacher} if objective == "distill" else {}
    return shared.tiny(**SIZES, objective=objective, **OBJECTIVES[objective], **of_teacher, **changes)


def is_rejected(objective: str, name: str) -> bool:
    return objective not in ACCEPTED.get(name, OBJECTIVES)


def describe(config: Config) -> tuple:
    """Returns the text of the gradient's program, without what only metrics need, and the rows that it reads."""
    return trace_gradient(config), choose_row_layout(config), config.data_rows


@functools.cache
def trace_gradient(config: Config) -> str:
    trainer = traced.make_trainer(config)

    def gradient(params, batch):
        return trainer.model.loss_and_grad(params, batch, trainer.dropout_key(0))[1]

    batch = trainer.model.batch_shapes() | trainer.model.constant_shapes()
    program = jax.make_jaxpr(gradient)(trainer.abstract.params, batch).jaxpr
    return re.sub(r"0x[0-9a-f]+", "", str(jaxprs.drop_dead(program)))  # without addresses of functions


def test_every_key_of_the_objective_has_a_value():
    assert set(keys_of(ObjectiveKeys)) == set(VALUES) & set(keys_of(ObjectiveKeys)) | OF_THE_HOST | {"objective"}


@pytest.mark.parametrize(("objective", "name"), [case for case in CASES if is_rejected(*case)])
def test_key_without_effect_is_rejected(teacher, objective, name):
    with pytest.raises(UsageError, match=name):
        make_config(objective, teacher, **OTHERS.get(name, {})).override({name: VALUES[name]})


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "name"), [case for case in CASES if not is_rejected(*case)])
def test_accepted_key_changes_the_gradient_or_the_rows(teacher, objective, name):
    config = make_config(objective, teacher, **OTHERS.get(name, {}))
    assert describe(config.override({name: VALUES[name]})) != describe(config)


def test_key_that_an_objective_forgets_is_noticed(teacher, broken):
    broken(expert_layer.RoutesOfLayers, "complete", lambda self, objective, records, constants: objective)
    config = make_config("distill", teacher, **EXPERTS, router="sigmoid")
    assert describe(config.override({"router_z_loss": 0.1})) == describe(config)
