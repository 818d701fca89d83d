"""Objectives besides the language loss, on a mesh, against their formulas in float64: the loss and its gradient.

The references know the papers and the dense model only. Each is a function of the log-probability of every target.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import dense_reference, traced, verify_exact
from tests import shared

SIZES = {"layers": 1, "d_model": 16, "heads": 4, "d_ff": 16, "seq": 8, "batch": 4, "mesh": "2x2", "positions": "none"}
PAIRS = {
    "dpo": {"label_smoothing": 0.3, "sft_weight": 0.2, "accum": 2},
    "dpo_normed": {"length_norm": True},
    "ipo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "reward_gap": 0.7},
    "kto": {"beta": 0.5, "accum": 2},
    "kto_clamped": {"beta": 0.5},
    "orpo": {"beta": 0.4, "sft_weight": 0.2},
}


def make_config(case: str, **changes):
    return shared.tiny(**SIZES | {"objective": case.partition("_")[0]} | changes)


def measure(config, params, tokens, targets):
    """Returns the log-probability of every target."""
    nats, _ = dense_reference.token_losses(config, params, tokens, targets)
    return -nats


def run(config, params, batch):
    """Returns our loss and gradients on the mesh."""
    return verify_exact.compute_gradients(traced.make_trainer(config), params, batch, verify_exact.draw_key(config))


def assert_equal(config, params, batch, reference) -> None:
    """Compares with the loss and the gradients of `reference(config, params, batch)`, the minimised loss."""
    got = run(config, params, batch)
    loss, gradients = exact.run(jax.value_and_grad(functools.partial(reference, config)), params, batch).outputs
    rows = verify_exact.compare(got, verify_exact.Result(loss, gradients, got.run), "the formula")
    assert [f"{row.name}: {row.relative:.1e}" for row in rows if not row.passes] == []


def measure_sides(config, params, batch, prefix=""):
    """Returns the sums over the scored tokens of each side, and their number, [B, 2]."""
    sides = []
    for side in range(2):
        tokens, targets, scored = (batch[f"{prefix}{name}"][:, side] for name in ("tokens", "targets", "scored"))
        sides.append((measure(config, params, tokens, targets) * scored).sum(1))
    return jnp.stack(sides, 1), batch[f"{prefix}scored"].sum(2)


def log_odds(logp):
    return logp - jnp.log(1 - jnp.exp(logp))


def sigmoid_loss(x, smoothing):
    return -(1 - smoothing) * jnp.log(jax.nn.sigmoid(x)) - smoothing * jnp.log(jax.nn.sigmoid(-x))


def compute_pair_losses(config, params, batch):
    """Returns the loss of each pair as its paper has it."""
    keys = config.preferences
    logp, tokens = measure_sides(config, params, batch)
    ratio = logp - batch["references"][..., 0] if "references" in batch else logp
    mean = ratio / tokens
    if keys.objective == "ipo":
        return (mean[:, 0] - mean[:, 1] - 1 / (2 * keys.beta)) ** 2
    if keys.objective == "simpo":
        return sigmoid_loss(keys.beta * (mean[:, 0] - mean[:, 1]) - keys.reward_gap, keys.label_smoothing)
    if keys.objective == "orpo":
        return -keys.beta * jnp.log(jax.nn.sigmoid(log_odds(mean[:, 0]) - log_odds(mean[:, 1])))
    if keys.objective == "kto":
        other, _ = measure_sides(config, params, batch, "kl_")
        fits = batch["kl_pairs"]
        divergence = ((other - batch["kl_references"]) * fits).sum() / fits.sum()
        z = jax.lax.stop_gradient(jnp.maximum(divergence, 0))
        sides = jax.nn.sigmoid(keys.beta * (ratio[:, 0] - z)), jax.nn.sigmoid(keys.beta * (z - ratio[:, 1]))
        return 1 - (sides[0] + sides[1]) / 2
    used = mean if keys.length_norm else ratio
    return sigmoid_loss(keys.beta * (used[:, 0] - used[:, 1]), keys.label_smoothing)


def compute_pair_objective(config, params, batch):
    """Returns the mean over the pairs, and the mean over the tokens of the SFT term."""
    pairs = batch["pairs"][:, 0]
    loss = (compute_pair_losses(config, params, batch) * pairs).sum() / pairs.sum()
    if "sft" not in batch:
        return loss
    nats = -measure(config, params, batch["tokens"][:, 0], batch["targets"][:, 0])
    return loss + config.preferences.sft * (nats * batch["sft"]).sum() / batch["sft"].sum()


def draw_pairs(case: str):
    """Returns a configuration, parameters, and pairs of which one row has none."""
    config = make_config(case, **PAIRS[case])
    params, batch = verify_exact.draw_parameters(config), verify_exact.draw_batch(traced.make_trainer(config))
    batch["scored"][..., -1] = 1
    batch["pairs"][0] = 0
    if "kl_references" in batch:
        batch["kl_scored"][..., -1] = batch["kl_pairs"][...] = 1
        # The divergence is below 0 where the reference is far likelier than the model, and else above.
        batch["kl_references"][...] = 10 if case == "kto_clamped" else -1000
        batch["references"][...] = -30 if case == "kto_clamped" else -40
        if case == "kto":
            batch["kl_references"][...] = -41
    return config, params, batch


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_have_the_loss_of_their_paper(case):
    config, params, batch = draw_pairs(case)
    assert_equal(config, params, batch, compute_pair_objective)


def test_divergence_of_kto_is_on_both_sides_of_the_clamp():
    """The negative twin of the cases above: one has a divergence, and the other would have a negative one."""
    for case, is_positive in (("kto", True), ("kto_clamped", False)):
        config, params, batch = draw_pairs(case)
        other = exact.run(lambda p, c=config, b=batch: measure_sides(c, p, b, "kl_")[0], params).outputs
        assert ((other - batch["kl_references"]).mean() > 0) == is_positive


def compute_policy_objective(config, params, batch):
    """Returns GRPO's loss: the clipped gain of every token of an answer, and its divergence from the reference."""
    keys = config.preferences
    logp = measure(config, params, batch["tokens"], batch["targets"])
    weights = batch["weights"] / batch["weights"].sum()
    ratio = jnp.exp(logp - batch["sampled"])
    clipped = jnp.where(ratio > 1 + keys.clip_ratio, 1 + keys.clip_ratio, ratio)
    clipped = jnp.where(ratio < 1 - keys.clip_ratio, 1 - keys.clip_ratio, clipped)
    gain = jnp.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
    behind = batch["references"] - logp
    divergence = ratio * (jnp.exp(behind) - behind - 1)
    return (weights * (keys.beta * divergence - gain)).sum()


def test_sampled_answers_have_the_loss_of_grpo():
    config = make_config("grpo", group_size=2, answer_tokens=3, beta=0.3, rollout_steps=2, accum=2, mask_prompt=True)
    params, batch = verify_exact.draw_parameters(config), verify_exact.draw_batch(traced.make_trainer(config))
    draw = np.random.default_rng(0)
    logp = exact.run(lambda p: measure(config, p, batch["tokens"], batch["targets"]), params).outputs
    batch["sampled"] = (logp + draw.normal(0, 0.3, logp.shape)).astype(np.float32)
    batch["references"] = (logp + draw.normal(0, 0.3, logp.shape)).astype(np.float32)
    assert_equal(config, params, batch, compute_policy_objective)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.json").write_text(shared.tiny(**SIZES | {"mesh": "1x1"}).to_json())
    return str(folder)


def compute_distillation(config, params, batch):
    """Returns the mean over the tokens of the divergence at a temperature, and of the loss of the data's tokens."""
    keys = config.preferences
    student, other = (
        dense_reference.logits(config, tree, batch["tokens"]) for tree in (params, batch["teacher"])
    )  # fmt: skip
    temperature = keys.distill_temperature
    student_p, teacher_p = (jax.nn.softmax(x / temperature, axis=-1) for x in (student, other))
    first, second = (teacher_p, student_p) if keys.divergence == "forward" else (student_p, teacher_p)
    divergence = (first * jnp.log(first / second)).sum(-1)
    nats = -measure(config, params, batch["tokens"], batch["targets"])
    return (keys.distill_weight * temperature**2 * divergence + (1 - keys.distill_weight) * nats).mean()


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_students_have_the_gradient_of_the_divergence(teacher, divergence):
    """The loss of this objective is that of the data's tokens."""
    config = make_config("distill", teacher=teacher, divergence=divergence, distill_weight=0.7, distill_temperature=2.0)
    params, batch = verify_exact.draw_parameters(config), verify_exact.draw_batch(traced.make_trainer(config))
    got = run(config, params, batch)
    gradients = exact.run(jax.grad(functools.partial(compute_distillation, config)), params, batch).outputs
    rows = verify_exact.compare(got, verify_exact.Result(got.loss, gradients, got.run), "the formula")
    assert [f"{row.name}: {row.relative:.1e}" for row in rows if not row.passes] == []


def test_minimised_loss_of_experts_is_the_published_one():
    """Switch's balance loss has no constant left out: the objective itself, not only its gradient."""
    keys = {"experts": 3, "bias": "none", "balance_loss": 0.5, "router_z_loss": 0.1, "router": "sigmoid", "mesh": "1x2"}
    config = shared.tiny(**SIZES | {"layers": 2} | keys)
    trainer = traced.make_trainer(config)
    params, batch = verify_exact.draw_parameters(config), verify_exact.draw_batch(trainer)
    shapes = trainer.model.shapes, verify_exact.describe(batch)
    objective, losses = exact.run(trainer.model.evaluate, params, batch, shapes=shapes).outputs

    def compute_routers(params):
        routes: list = []
        dense_reference.token_losses(config, params, batch["tokens"], batch["targets"], routes=routes)
        shares = [(chosen.sum((0, 1)) / chosen.sum(), scores.mean((0, 1))) for chosen, scores, _ in routes]
        balance = sum(3 * (load * score).sum() for load, score in shares)
        return 0.5 * balance + 0.1 * sum((log_z**2).mean() for *_, log_z in routes)

    expected = exact.run(compute_routers, params).outputs
    assert objective - losses.loss == pytest.approx(float(expected), rel=1e-10)
