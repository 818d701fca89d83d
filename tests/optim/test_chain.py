"""The whole chain against plain optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer import legacy, optim
from shardformer.config import Config
from shardformer.optim import chain
from tests import asserts, shared

BASE = Config.of(lr=1e-2, lr_min=1e-3, warmup=10, steps=110)


def tree(seed: int):
    """A matrix that decays, and what never does: in stacked layers a bias and a gain have two axes as well."""
    shapes = {
        "transformer/layers": {"q": (2, 4, 4), "q_bias": (2, 4)},
        "transformer/layers/norm": {"scale": (2, 4)},
        "transformer/embed": {"tokens": (6, 3), "previous": (2, 6, 3), "project": (3, 4)},
    }
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    return {
        module: {name: jax.random.normal(next(keys), shape) for name, shape in leaves.items()}
        for module, leaves in shapes.items()
    }


DECAYED = {
    "transformer/layers": {"q": True, "q_bias": False},
    "transformer/layers/norm": {"scale": False},
    "transformer/embed": {"tokens": True, "previous": True, "project": True},
}


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_three_steps_equal_plain_adamw(clip, weight_decay):
    config = BASE.replace(clip=clip, weight_decay=weight_decay, warmup=2, steps=6)
    schedule = optim.learning_rate(config)
    plain = optax.chain(
        *([optax.clip_by_global_norm(clip)] if clip else []),
        optax.adamw(schedule, config.optimizer.beta1, config.optimizer.beta2, weight_decay=weight_decay, mask=DECAYED),
    )
    got, expected = tree(0), tree(0)
    ours = optim.make_optimizer(config)
    our_state, plain_state = ours.init(got), plain.init(expected)
    with jax.numpy_dtype_promotion("standard"):
        for step in range(3):
            grads = tree(step + 1)
            updates, our_state = ours.update(grads, our_state, got, step=jnp.int32(step))
            got = optax.apply_updates(got, updates)
            updates, plain_state = plain.update(grads, plain_state, expected)
            expected = optax.apply_updates(expected, updates)
    errors = jax.tree.leaves(jax.tree.map(asserts.relative, got, expected))
    assert max(errors) < 1e-6
    moved = jax.tree.leaves(jax.tree.map(asserts.relative, got, tree(0)))
    assert min(moved) > 1e-3


def test_the_rate_is_that_of_the_step_given():
    """The optimizer keeps no counter: a step that is not applied must not advance the schedule."""
    optimizer = optim.make_optimizer(BASE)
    params, grads = tree(0), tree(1)
    state = optimizer.init(params)
    first, after = optimizer.update(grads, state, params, step=jnp.int32(0))
    tenth, _ = optimizer.update(grads, state, params, step=jnp.int32(9))
    np.testing.assert_allclose(
        tenth["transformer/embed"]["tokens"], 10 * first["transformer/embed"]["tokens"], rtol=1e-5
    )
    again, _ = optimizer.update(grads, after, params, step=jnp.int32(0))
    assert asserts.relative(again["transformer/embed"]["tokens"], first["transformer/embed"]["tokens"]) < 0.5


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}, {"optimizer": "lbfgs", "clip": 0, "weight_decay": 0}])
def test_installing_legacy_changes_nothing(changes):
    """optax.chain has a list for its state then, as GPT-J-era code expects."""
    settings = BASE.replace(lr_rules="scale=frozen", **changes)

    def kept():
        return jax.tree.structure(jax.eval_shape(optim.make_optimizer(settings).init, tree(0)))

    before = kept()
    with legacy.installed():
        assert isinstance(optax.chain(optax.identity()).init(tree(0)), list)
        assert kept() == before


@pytest.mark.slow
def test_lr_zero_leaves_the_parameters():
    trainer = shared.trainer(lr=0.0, lr_min=0.0)
    state = trainer.init()
    before = shared.on_host(state.params)
    state, _ = trainer.step(state, shared.batch(), 0)
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, shared.on_host(state.params), before)


def test_the_optimizer_lies_as_its_parameters_do():
    trainer = shared.trainer(lr=0.0, lr_min=0.0)
    state = trainer.init()
    adam = next(part for part in state.optimizer if hasattr(part, "mu"))
    for moments in (adam.mu, adam.nu):
        same = jax.tree.map(lambda m, p: m.sharding.is_equivalent_to(p.sharding, p.ndim), moments, state.params)
        assert all(jax.tree.leaves(same))
    assert (
        adam.mu["transformer/layers"]["q"].addressable_shards[0].data.size * 2
        == adam.mu["transformer/layers"]["q"].size
    )


def test_clip_uses_the_given_norm():
    clip = chain._clip_by_norm(optax.with_extra_args_support(optax.identity()), 1.0)
    updates = {"w": jnp.full(4, 2.0)}
    given, _ = clip.update(updates, clip.init(updates), norm=jnp.float32(8))
    measured, _ = clip.update(updates, clip.init(updates))
    np.testing.assert_allclose(given["w"], 0.25)
    np.testing.assert_allclose(measured["w"], 0.5)  # its norm is 4


def test_matrices_of_a_task_decay_and_vectors_do_not():
    config = BASE.replace(clip=0.0, weight_decay=0.5, warmup=0)
    params = {"mlp": {"w": jnp.ones((3, 4)), "q": jnp.ones(3)}}  # q: a name of the language model's matrices
    optimizer = optim.make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params, step=jnp.int32(5))
    assert (updates["mlp"]["w"] < 0).all()
    assert (updates["mlp"]["q"] == 0).all()
