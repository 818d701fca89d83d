"""scale=completep against the groups of parameters that EleutherAI's nanoGPT-mup gives to AdamW, and muon's factor."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer import exact, optim
from shardformer.model import Model
from tests import asserts, shared
from tests.optim import trees

WIDTH, DEPTH = 4, 2  # 8 wide and 2 deep: tuned at 2 and 1
SETTINGS = {"d_model": 8, "heads": 4, "layers": 2, "mesh": "1x1", "clip": 0.0, "optimizer": "adamw"}
SCALE = "completep:2x1"
MATRICES = {"q", "up", "down"}
SMALL = 1e-8  # gradients as small as adam's epsilon, which is scaled too


def group_of(module: str, name: str) -> str:
    if module == "transformer/layers" and name in MATRICES:
        return "hidden weight"
    if module.startswith("transformer/layers"):
        return "hidden bias and norm"
    return "table" if name in {"tokens", "w"} else "last bias"


def published(settings) -> optax.GradientTransformation:
    """configure_optimizers of nanoGPT-mup: (factor of the rate, decay, epsilon) of each group."""
    decay, eps = settings.optimizer.weight_decay, 1e-8
    groups = {
        "table": (1, decay, eps / WIDTH),
        "last bias": (1, 0.0, eps / WIDTH),
        "hidden bias and norm": (1, 0.0, eps / WIDTH / DEPTH),
        "hidden weight": (1 / WIDTH, decay * WIDTH, eps / WIDTH / DEPTH),
    }

    def adamw(factor, decay, eps):
        rate = optim.learning_rate(settings)
        keys = settings.optimizer
        return optax.adamw(lambda step: factor * rate(step), keys.beta1, keys.beta2, eps, weight_decay=decay)

    labels = {module: {name: group_of(module, name) for name in leaves} for module, leaves in trees.SHAPES.items()}
    return optax.partition({name: adamw(*group) for name, group in groups.items()}, labels)


def after_steps(optimizer, size: float, **extra):
    """The parameters after three steps by gradients of about this size, in float64."""

    def train(params, gradients):
        state = optimizer.init(params)
        for step, grads in enumerate(gradients):
            given = {name: jnp.int32(step) for name in extra}
            updates, state = optimizer.update(grads, state, params, **given)
            params = optax.apply_updates(params, updates)
        return params

    gradients = [jax.tree.map(lambda leaf: size * leaf, trees.tree(step + 1)) for step in range(3)]
    with jax.numpy_dtype_promotion("standard"):
        return exact.run(train, trees.tree(0), gradients).outputs


@pytest.mark.parametrize("size", [1.0, SMALL])
def test_three_steps_equal_the_published_groups(size):
    settings = trees.config(scale=SCALE, **SETTINGS)
    expected = after_steps(published(settings), size)
    got = after_steps(optim.make_optimizer(settings), size, step=0)
    unscaled = after_steps(optim.make_optimizer(trees.config(**SETTINGS)), size, step=0)
    assert max(trees.errors(got, expected).values()) < 1e-6
    wrong = {name for name, error in trees.errors(unscaled, expected).items() if error > 1e-4}
    hidden = {f"transformer/layers/{name}" for name in MATRICES}
    assert wrong == (hidden if size == 1.0 else set(trees.errors(got, expected)))


def test_update_of_muon_shrinks_with_the_root_of_the_width():
    settings = SETTINGS | {"optimizer": "muon", "weight_decay": 0.0}

    def update(**changes):
        config = trees.config(**settings, **changes)
        optimizer = optim.make_optimizer(config, lambda function, tree: jax.tree.map(function, tree))

        def compute(gradients, params):
            return optimizer.update(gradients, optimizer.init(params), params, step=jnp.int32(0))[0]

        return exact.run(compute, trees.tree(1), trees.tree(0)).outputs

    plain, scaled = update(), update(scale=SCALE)
    for module, leaves in plain.items():
        for name, leaf in leaves.items():
            factor = WIDTH**-0.5 if group_of(module, name) == "hidden weight" else 1.0
            np.testing.assert_allclose(scaled[module][name], factor * leaf, rtol=1e-5, atol=1e-8)


def test_tuned_size_is_the_model_without_scale():
    plain, tuned = shared.tiny(), shared.tiny(scale="completep:32x2")
    assert asserts.is_bitwise_equal(shared.drawn(plain, 7), shared.drawn(tuned, 7))
    assert (tuned.model.branch_scale, tuned.model.head_scale) == (1.0, 1.0)


@pytest.mark.parametrize("init_std", [0.02, pytest.param(None, marks=pytest.mark.slow)])
def test_initial_values_follow_the_width(init_std):
    wide = shared.tiny(d_model=64, heads=16, layers=4, init_std=init_std, tied=False)
    got = shared.drawn(wide.replace(scale="completep:16x2"), 7)
    plain = shared.drawn(wide, 7)

    def ratio(module, name):
        return float(jnp.std(got[module][name]) / jnp.std(plain[module][name]))

    hidden, last, table = (0.5, 0.5 * 2**0.5, 1.0) if init_std else (1.0, 2**0.5, 2.0)
    layers = "transformer/layers"
    assert ratio(layers, "q") == pytest.approx(hidden, rel=1e-5)
    assert [ratio(layers, name) for name in ("o", "down")] == pytest.approx([last] * 2, rel=1e-5)
    tables = [ratio("transformer/embed", "tokens"), ratio("transformer/head", "w")]
    assert tables == pytest.approx([table] * 2, rel=1e-5)


def test_factors_are_written_out_for_other_formats():
    config = shared.tiny(d_model=64, layers=4, scale="completep:16x2", logits_scale=0.5)
    plain = config.with_factors()
    assert (plain.model.scale, plain.model.residual_scale, plain.model.logits_scale) == ("", 0.5, 0.125)
    assert Model.abstract_parameters(plain) == Model.abstract_parameters(config)


def test_initial_matrices_of_latents_have_their_own_fan_in():
    latents = {"kv_latent": 16, "q_latent": 8, "rotary_dims": 4, "head_dim": 8, "bias": "none", "init_std": None}
    layers = shared.drawn(shared.tiny(d_model=64, **latents), 7)["transformer/layers"]
    found = {name: float(jnp.std(layers[name])) for name in ("q", "k", "v", "kv_latent")}
    assert found == pytest.approx({"q": 8**-0.5, "k": 0.25, "v": 0.25, "kv_latent": 0.125}, rel=0.05)
