"""optimizer=lbfgs against optax.lbfgs on whole arrays; the line search through the loss of a sharded model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.model import Loss
from shardformer.optim import lbfgs, rules
from tests import asserts, shared
from tests.optim import trees

SETTINGS = {"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0}


def objective(params):
    """A bowl of another steepness for each parameter, and not quite quadratic; its least is far from zero."""
    bowls = [(1 + i) * jnp.square(leaf - 3) + jnp.cos(leaf) for i, leaf in enumerate(jax.tree.leaves(params))]
    return sum(map(jnp.sum, bowls)) / 100


def plain_lbfgs(params, objective, steps=trees.STEPS):
    """Runs optax's L-BFGS as its documentation does, on global arrays; returns the values as well."""
    optimizer = optax.lbfgs()

    def update(params, state):
        value, grad = jax.value_and_grad(objective)(params)
        updates, state = optimizer.update(grad, state, params, value=value, grad=grad, value_fn=objective)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        update = jax.jit(update)
        for _ in range(steps):
            params, state, value = update(params, state)
            values.append(float(value))
    return params, values


@pytest.fixture(scope="module")
def expected():
    return plain_lbfgs(trees.tree(0), objective)


@pytest.mark.slow
def test_five_steps_equal_plain_lbfgs(expected):
    """On one mesh; tests/integration/test_cookbook.py takes the steps of a trainer exactly, on all four."""
    params, values = expected
    settings = trees.config(mesh="2x4", **SETTINGS)
    got, state = trees.ours(settings, objective)
    assert max(trees.errors(got, params).values()) < 1e-5
    assert values == sorted(values, reverse=True)
    assert lbfgs.step_size(state) > 0
    for name in ("diff_params_memory", "diff_updates_memory"):
        history = optax.tree.get(state, name)["transformer/layers"]["q"]
        assert history.shape == (10, 2, 8, 8)
        assert history.addressable_shards[0].data.shape == (10, 2, 8, 8 // settings.parallel.mp)


@pytest.mark.slow
def test_a_shard_alone_would_take_other_steps(expected):
    """The twin: norms, products and a line search over a quarter of every parameter."""

    def quarter(tree):
        return jax.tree.map(lambda leaf: leaf[..., : leaf.shape[-1] // 4], tree)

    params, _ = plain_lbfgs(quarter(trees.tree(0)), objective)
    assert min(trees.errors(params, quarter(expected[0])).values()) > 1e-4


@pytest.mark.slow
def test_frozen_parameters_stay_and_the_others_go_their_own_way():
    settings = trees.config(**SETTINGS, lr_rules="layers=frozen")
    got, state = trees.ours(settings, objective)
    start = trees.tree(0)
    learned = {module: start[module] for module in ("transformer/embed", "transformer/head")}
    alone, _ = plain_lbfgs(learned, lambda learned: objective(start | learned))
    for module, leaves in got.items():
        for name, leaf in leaves.items():
            if "layers" in module:
                np.testing.assert_array_equal(leaf, start[module][name])
            else:
                assert asserts.relative(leaf, alone[module][name]) < 1e-5
    kept = [rules.full_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert kept
    assert not [name for name in kept if "layers" in name]


SMALL = {"layers": 1, "bias": "none", "positions": "none", "mesh": "2x4"} | SETTINGS


@pytest.mark.nightly
def test_a_trainer_s_loss_falls_at_every_step():
    trainer = shared.trainer(**SMALL)
    state, losses = shared.initial_state(**SMALL), []
    for step in range(5):
        state, metrics = trainer.step(state, shared.batch(), step)
        losses.append(trainer.read_metrics(metrics).loss)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "changes", [{"clip": 1.0}, {"weight_decay": 0.1}, {"accum": 2}, {"lr_rules": "up=frozen,bias=2x"}]
)
def test_what_a_line_search_cannot_follow(changes):
    Config.of(**SETTINGS)
    with pytest.raises(UsageError):
        Config.of(**SETTINGS | changes)


def test_a_line_search_starts_at_the_objective_with_its_z_loss():
    losses = Loss(jnp.float32(3), jnp.float32(2), jnp.float32(0))
    arguments = lbfgs.search_arguments(None, losses, None, shared.tiny(z_loss=0.25))
    assert float(arguments["value"]) == 3 + 0.25 * 2


def test_direction_descends():
    """At the first step it is that of the falling gradient, and later one in which the loss falls too."""
    direction, params = lbfgs.direction(), {"q": jnp.array([3.0, -2.0, 1.0])}
    curvature = jnp.array([1.0, 4.0, 9.0])  # of a bowl
    state = direction.init(params)
    for _ in range(4):
        gradient = {"q": curvature * params["q"]}
        updates, state = direction.update(gradient, state, params)
        assert (updates["q"] * gradient["q"]).sum() < 0
        params = {"q": params["q"] + 0.1 * updates["q"]}
