"""The schedule's values, and the whole chain against plain optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer import legacy, optim
from shardformer.config import Config
from shardformer.optim import chain
from tests import asserts, shared

BASE = Config(lr=1e-2, lr_min=1e-3, warmup=10, steps=110)


def rates(**changes) -> np.ndarray:
    config = BASE.replace(**changes)
    with jax.numpy_dtype_promotion("standard"):  # as the chain itself calls it
        return np.array(jax.vmap(optim.learning_rate(config))(jnp.arange(config.steps + 10)))


def test_schedule_rises_to_its_peak_and_falls_to_its_end():
    rate = rates()
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) * 1e-3, rtol=1e-6)  # the first step learns too
    assert rate.argmax() in (9, 10)
    np.testing.assert_allclose(rate[[10, 60, 110, 119]], [1e-2, 5.5e-3, 1e-3, 1e-3], rtol=1e-5)
    assert (np.diff(rate[10:111]) < 0).all()


@pytest.mark.parametrize(
    "changes", [{"warmup": 0}, {"warmup": 0, "steps": 1}, {"warmup": 1}, {"warmup": 1, "steps": 1}]
)
def test_without_a_warm_up_the_peak_comes_first(changes):
    rate = rates(**changes)
    np.testing.assert_allclose(rate[0], 1e-2, rtol=1e-6)
    np.testing.assert_allclose(rate[-1], 1e-3, rtol=1e-5)


@pytest.mark.parametrize("warmup", [20, 21, 1000])
def test_a_warm_up_longer_than_the_run_still_ends_at_the_end(warmup):
    rate = rates(warmup=warmup, steps=20)
    assert rate.argmax() in (18, 19)
    np.testing.assert_allclose(rate.max(), 1e-2, rtol=1e-6)
    np.testing.assert_allclose(rate[20:], 1e-3, rtol=1e-5)


def test_decay_steps_end_the_cosine_before_the_run():
    rate = rates(decay_steps=50)
    assert rate[49] > 1e-3
    np.testing.assert_allclose(rate[50:], 1e-3, rtol=1e-5)


def test_a_rate_below_lr_min_never_climbs_to_it():
    rate = rates(lr=1e-4)
    np.testing.assert_allclose(rate[10:], 1e-4, rtol=1e-6)


def test_no_rate_at_all():
    assert not rates(lr=0.0).any()


def tree(seed: int):
    """A matrix that decays, and what never does: in stacked layers a bias and a gain have two axes as well."""
    shapes = {
        "layers": {"q": (2, 4, 4), "q_bias": (2, 4)},
        "layers/norm": {"scale": (2, 4)},
        "embed": {"tokens": (6, 4)},
    }
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    return {
        module: {name: jax.random.normal(next(keys), shape) for name, shape in leaves.items()}
        for module, leaves in shapes.items()
    }


DECAYED = {"layers": {"q": True, "q_bias": False}, "layers/norm": {"scale": False}, "embed": {"tokens": True}}


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_three_steps_equal_plain_adamw(clip, weight_decay):
    config = BASE.replace(clip=clip, weight_decay=weight_decay, warmup=2, steps=6)
    schedule = optim.learning_rate(config)
    plain = optax.chain(
        *([optax.clip_by_global_norm(clip)] if clip else []),
        optax.adamw(schedule, config.beta1, config.beta2, weight_decay=weight_decay, mask=DECAYED),
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
    np.testing.assert_allclose(tenth["embed"]["tokens"], 10 * first["embed"]["tokens"], rtol=1e-5)
    again, _ = optimizer.update(grads, after, params, step=jnp.int32(0))
    assert asserts.relative(again["embed"]["tokens"], first["embed"]["tokens"]) < 0.5


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
    clip = chain._clip_by_norm(1.0)
    updates = {"w": jnp.full(4, 2.0)}
    given, _ = clip.update(updates, clip.init(updates), norm=jnp.float32(8))
    measured, _ = clip.update(updates, clip.init(updates))
    np.testing.assert_allclose(given["w"], 0.25)
    np.testing.assert_allclose(measured["w"], 0.5)  # its norm is 4
