"""Random configurations over all keys of a step, on meshes of up to 64 devices, against the dense reference.

Other objectives than the plain loss have formulas of their own in objective_reference.py. What has neither is compared
with one device. A configuration that cannot run must be rejected by a UsageError.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

from shardformer import exact
from shardformer.adapters import adapter_keys
from shardformer.analysis import traced, verify_exact
from shardformer.analysis.verify_exact import Result
from shardformer.config.key_rules import check_zero
from shardformer.errors import UsageError
from tests import meshes, shared, tiers
from tests.integration import objective_reference
from tests.integration.random_keys import OBJECTIVES, OF_ANSWERS, draw_keys

ACCEPTED, DRAWN = (200, 700) if tiers.ALL_CASES else (25, 150)
SHORT = (2, 11, 22, 53)  # configurations of different meshes and features
FORMULA, ONE_DEVICE = 1e-9, 1e-10  # relative differences
WITH_STEPS = 10  # of so many configurations, one is trained for three steps as well


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Returns the folder of a teacher's configuration; its weights are drawn."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.json").write_text(shared.tiny(layers=1, d_model=16, mesh="1x1").to_json())
    return folder


def make_config(seed: int, teacher):
    """Returns the configuration of a seed; raises UsageError if it breaks a rule."""
    config = shared.tiny(**draw_keys(seed, str(teacher)))
    check_zero(config)
    make_trainer(config)
    return config


make_trainer = functools.lru_cache(maxsize=1)(verify_exact.make_trainer)  # for its rules, gradients and steps


def has_formula(config) -> bool:
    """Returns whether the objective is computed plainly, without random masks, experts or codes."""
    drops = config.training.dropout or config.lora.lora_dropout
    return not (drops or config.experts.experts or config.stored.quantized)


def compute_plainly(config, batch) -> Result:
    """Returns the loss and the gradients by the formula of the objective."""
    single = verify_exact.on_one_device(config)
    teacher = read_teacher_of(single) if config.preferences.objective == "distill" else None

    def compute(params, batch):
        return objective_reference.compute_objective(single, params, batch, teacher)

    run = exact.run(jax.value_and_grad(compute), verify_exact.draw_parameters(config), batch)
    loss, gradients = run.outputs
    return Result(loss, adapter_keys.select_trainable(gradients, config), run)


def read_teacher_of(config):
    return traced.make_trainer(config).model.teacher.config


def find_wrong(config) -> list[str]:
    """Returns the names of results that differ from those expected."""
    objective, batch = config.preferences.objective, verify_exact.draw_batch(make_trainer(config))
    if in_bfloat16(config) or not (verify_exact.has_dense_reference(config) or has_formula(config)):
        rows, bound = compare_with_one_device(config), ONE_DEVICE
    elif objective == "lm":
        params, key = verify_exact.draw_parameters(config), verify_exact.draw_key(config)
        dense = verify_exact.compute_dense(verify_exact.on_one_device(config), params, batch, key)
        rows, bound = verify_exact.compare(compute_gradients(config), dense, "dense"), FORMULA
    else:
        got, expected = compute_gradients(config), compute_plainly(config, batch)
        if objective in ("distill", "mtp"):  # whose loss is a part of the objective
            got = got._replace(loss=objective_reference.add_up(config, got.run.outputs[0]))
        rows, bound = verify_exact.compare(got, expected, "the formula"), FORMULA
    return [
        f"{row.name} differs from {row.expected} by {row.relative:.1e}" for row in rows if not row.relative <= bound
    ]


def in_bfloat16(config) -> bool:
    """Returns whether constants are rounded to bfloat16."""
    return "bfloat16" in (config.parallel.dtype, config.optimizer.param_dtype, config.parallel.grad_dtype)


def compute_gradients(config) -> Result:
    return meshes.compute_gradients(config, trainer=make_trainer(config))


def compare_with_one_device(config) -> list:
    single = meshes.compute_on_one_device(meshes.simplify(config))
    return verify_exact.compare(compute_gradients(config), single, "one device")


def compare_steps(config) -> list[str]:
    after = meshes.run_steps(config, make_trainer(config))
    rows = verify_exact.compare_states(after, meshes.run_steps_on_one_device(meshes.simplify(config)))
    return [f"{row.name} differs by {row.relative:.1e}" for row in rows if not row.relative <= ONE_DEVICE]


@pytest.mark.parametrize("seed", SHORT)
def test_random_configuration_is_right(seed, teacher):
    config = make_config(seed, teacher)
    assert find_wrong(config) == []


@pytest.mark.parametrize("objective", [*OBJECTIVES, *OF_ANSWERS])
def test_objective_equals_its_formula(objective, teacher):
    samples = objective in ("grpo", *OF_ANSWERS)
    keys = {"group_size": 2, "answer_tokens": 8, "rollout_steps": 2} if samples else {}
    keys |= (
        {"teacher": str(teacher), "distill_weight": 0.6, "distill_temperature": 2.0} if objective == "distill" else {}
    )
    assert find_wrong(shared.tiny(mesh="2x2", objective=objective, z_loss=0.01, **keys)) == []


def test_two_predictions_equal_their_formula():
    keys = {"z_loss": 0.1, "logits_cap": 2.0, "logits_scale": 0.4, "embed": "norm", "norm": "rmsnorm_plus_one"}
    assert find_wrong(shared.tiny(mesh="2x2", objective="mtp", zero=3, **keys)) == []


def test_rewards_of_pairs_equal_their_formula():
    keys = {"documents": "masked", "reward_center": 0.2, "logits_cap": 2.0, "logits_scale": 0.4, "base": "a run"}
    assert find_wrong(shared.tiny(mesh="2x2", objective="reward", **keys)) == []


@pytest.mark.parametrize("keys", [{"documents": "masked"}, {"length_norm": True, "label_smoothing": 0.1}], ids=str)
def test_options_of_pairs_equal_their_formula(keys):
    assert find_wrong(shared.tiny(mesh="2x2", objective="dpo", sft_weight=0.4, **keys)) == []


def test_wrong_formula_is_noticed(broken):
    broken(objective_reference, "smooth", lambda margin, share: -0.99 * jnp.log(jax.nn.sigmoid(margin)))
    assert find_wrong(shared.tiny(mesh="2x2", objective="dpo"))


@pytest.mark.slow
def test_random_configurations_are_right_or_rejected(teacher):
    rejected: collections.Counter[str] = collections.Counter()
    wrong, accepted = {}, 0
    for seed in range(DRAWN):
        try:
            config = make_config(seed, teacher)
        except UsageError as error:
            rejected[name_rule(str(error))] += 1
            continue
        found = find_wrong(config) + (compare_steps(config) if accepted % WITH_STEPS == 0 else [])
        if found:
            wrong[seed] = found
        meshes.forget_results()
        accepted += 1
        if accepted == ACCEPTED:
            break
    print(
        f"{accepted} accepted; rejected by", *(f"{count:4} {rule}" for rule, count in rejected.most_common()), sep="\n"
    )
    assert wrong == {}
    assert accepted == ACCEPTED


def name_rule(message: str) -> str:
    """Returns the message without its values."""
    return " ".join(word for word in message.split(",")[0].split() if not any(c.isdigit() or c == "=" for c in word))[
        :70
    ]
