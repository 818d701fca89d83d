"""The invariants of every step, each with a formulation that breaks it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.model.measuring import Measures
from shardformer.training.evaluation import Evaluator
from shardformer.training.example_gradients import ExampleGradients
from shardformer.training.step import OneProgram, TrainState
from shardformer.training.trainer import Trainer
from tests import asserts, sharded, shared, tiers
from tests.integration.made_up import FINE, GPT2, apply, like, noise, numpy


def distance(a, b):
    return sum(np.sum((x - y) ** 2) for x, y in zip(*map(jax.tree.leaves, (numpy(a), numpy(b))), strict=True)) ** 0.5


# One step counter.


def at_step(state, step):
    return state._replace(step=jnp.full_like(state.step, step))


def test_the_rate_follows_the_states_step():
    t = shared.trainer(mesh="1x1")
    state = t.init()
    moves = {}
    for step in (0, 1, 3, 20, 39):
        after, _ = apply(mesh="1x1")(at_step(state, step), FINE, noise(state.params), np.int32(step))
        assert int(after.step) == step + 1
        moves[step] = distance(after.params, state.params)
    rates = {step: float(t.update.learning_rate(step)) for step in moves}
    assert len({round(rate, 9) for rate in rates.values()}) == 5
    for step, move in moves.items():
        assert abs(move / moves[0] / (rates[step] / rates[0]) - 1) < 1e-3, step


def test_the_dropout_key_follows_the_states_step():
    t, batch = shared.trainer(mesh="1x1", dropout=0.2), shared.batch()
    params = t.model.init(0)
    loss = jax.jit(lambda params, step: t.model.evaluate(params, batch, t.dropout_key(step))[1].loss)
    losses = [float(loss(params, np.int32(step))) for step in (0, 0, 1, 2)]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_the_dropout_keys_of_a_seed_are_kept():
    """A resumed run draws the masks of the version that began it."""
    update = shared.trainer(mesh="1x1", dropout=0.2, seed=5).update
    keys = {step: update.dropout_key(np.int32(step)).tolist() for step in (0, 7)}
    assert keys == {0: [7157451, 3551478416], 7: [4047490726, 966624689]}


def test_a_batch_of_another_step_changes_nothing():
    state = at_step(shared.trainer(mesh="2x4").init(), 5)
    for batch_step, moves in ((4, False), (6, False), (5, True)):
        after, _ = apply(mesh="2x4")(state, FINE, noise(state.params), np.int32(batch_step))
        assert asserts.is_bitwise_equal(state, after) != moves


# A number that is not finite.


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_step_and_those_after_it_change_nothing(where, poison):
    state = shared.trainer(mesh="2x4").init()
    sound = noise(state.params)
    losses = FINE._replace(loss=jnp.float32(poison)) if where == "loss" else FINE
    grads = jax.tree.map(jnp.copy, sound)
    if where == "gradient":
        q = grads["transformer/layers"]["q"]
        grads["transformer/layers"]["q"] = q.at[1, 2, 3].set(poison)
    after, metrics = apply(mesh="2x4")(state, losses, grads, np.int32(0))
    assert not np.isfinite(metrics).all()
    assert asserts.is_bitwise_equal(state, after)
    for step in (1, 2):  # the loop has moved on, and learns of it steps later
        after, _ = apply(mesh="2x4")(after, FINE, sound, np.int32(step))
        assert asserts.is_bitwise_equal(state, after)
    moved, _ = apply(mesh="2x4")(state, FINE, sound, np.int32(0))
    assert not any(
        asserts.is_bitwise_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True)
    )


@pytest.mark.slow
def test_a_step_of_poisoned_parameters_changes_nothing():
    t, step = shared.trainer(mesh="2x4"), shared.update_and_grads(mesh="2x4")
    state = t.init()
    scale = state.params["transformer/head/norm"]["scale"]
    state.params["transformer/head/norm"]["scale"] = scale.at[3].set(np.inf)
    after, metrics, _ = step(state, shared.batch(), np.int32(0))
    assert not np.isfinite(metrics).all()
    assert asserts.is_bitwise_equal(state, after)
    update = jax.jit(lambda grads: t.optimizer.update(grads, state.optimizer, state.params, step=state.step))
    unguarded, _ = update(like(state.params, np.nan))
    assert np.isnan(unguarded["transformer/layers"]["q"]).all()  # what optax alone would have added to everything


def test_average_and_accumulation_follow_each_microbatch():
    """The average takes the weights after the update; a poisoned microbatch takes the step's first part with it."""
    overrides = {"mesh": "1x1", "accum": 2, "accum_mode": "multisteps", "ema": 0.5}
    state = shared.trainer(**overrides).init()
    grads = noise(state.params)
    half, _ = apply(**overrides)(state, FINE, grads, np.int32(0))
    assert int(half.optimizer.mini_step) == 1
    done, _ = apply(**overrides)(half, FINE, grads, np.int32(1))
    expected = jax.tree.map(lambda p, q: p / 3 + 2 * q / 3, numpy(half.average), numpy(done.params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), numpy(done.average), expected)
    assert distance(done.average, half.average) > 1e-3
    spoiled, _ = apply(**overrides)(half, FINE._replace(loss=jnp.float32(np.nan)), grads, np.int32(1))
    assert int(spoiled.optimizer.mini_step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(numpy(spoiled.optimizer.acc_grads)))


@pytest.mark.slow
def test_rounding_noise_follows_the_states_step():
    overrides = {"mesh": "1x1", "moment_dtype": "bfloat16"}
    state = shared.trainer(**overrides).init()
    grads = noise(state.params)
    moments = [
        first_moments(apply(**overrides)(at_step(state, step), FINE, grads, np.int32(step))[0]) for step in (0, 0, 1)
    ]
    assert asserts.is_bitwise_equal(*moments[:2])
    assert not asserts.is_bitwise_equal(*moments[1:])


def test_a_weight_that_would_leave_the_range_of_float32_stays():
    overrides = {"mesh": "1x1", "lr": 1e36, "lr_rules": "down_bias=1e6x"}
    state = shared.trainer(**overrides).init()
    after, _ = apply(**overrides)(state, FINE, noise(state.params), np.int32(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))
    assert not asserts.is_bitwise_equal(
        state.params["transformer/layers"]["q"], after.params["transformer/layers"]["q"]
    )
    assert asserts.is_bitwise_equal(
        state.params["transformer/layers"]["down_bias"], after.params["transformer/layers"]["down_bias"]
    )


MODERATE = {"layers": 2, "d_model": 256, "heads": 8, "seq": 4, "vocab": 256}


def temporary_over_parameters(t, update):
    batch = {
        name: jax.ShapeDtypeStruct((t.config.training.batch, t.config.model.seq), jnp.int32)
        for name in ("tokens", "targets")
    }
    step = jax.ShapeDtypeStruct((), jnp.int32)
    jitted = jax.jit(update, donate_argnums=0, out_shardings=(t.shardings, t.model.sharding(P())))
    temporary = jitted.lower(t.abstract, batch, step).compile().memory_analysis().temp_size_in_bytes
    return temporary / sum(4 * leaf.size for leaf in jax.tree.leaves(t.model.shapes))


# Gradients and updates are 2.0; with zero=1 the gathered parameters and the gradients.
@pytest.mark.parametrize(("name", "zero", "most"), tiers.shorten([("4x1", 3, 1.0), ("4x1", 1, 2.45), ("1x1", 0, 2.45)]))
def test_the_guard_holds_no_second_state(name, zero, most):
    config = shared.tiny(mesh=name, zero=zero, batch=4, **MODERATE)
    t = Trainer(config, mesh.make(config))
    assert temporary_over_parameters(t, OneProgram(t.update, t.shardings).train_step) < most


@pytest.mark.slow
def test_guard_that_waits_for_the_update_holds_two_states():
    config = shared.tiny(mesh="1x1", batch=4, **MODERATE)
    t = Trainer(config, mesh.make(config))

    def update(state, batch, step):
        losses, grads = t.model.loss_and_grad(state.params, batch, t.dropout_key(state.step))
        updates, optimizer = t.optimizer.update(grads, state.optimizer, state.params, step=state.step)
        norm = optax.tree.norm(updates)
        new = state._replace(step=step + 1, params=optax.apply_updates(state.params, updates), optimizer=optimizer)

        def choose(new, old):
            return jnp.where(jnp.isfinite(norm), new, old)

        return jax.tree.map(choose, new, state), jnp.stack([*losses, norm])

    assert temporary_over_parameters(t, update) > 3


# Clipping.


def first_moments(state: TrainState):
    (adam,) = (node for node in jax.tree.leaves(state.optimizer, is_leaf=is_adam) if is_adam(node))
    return adam.mu


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


@pytest.mark.parametrize("name", ["1x1", "4x2"])
def test_clipping_is_by_the_norm_of_whole_arrays(name):
    state = shared.trainer(mesh=name).init()
    grads = noise(state.params)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads)))
    after, metrics = apply(mesh=name)(state, FINE, grads, np.int32(0))
    assert abs(float(metrics.grad_norm) / norm - 1) < 1e-6
    config = shared.trainer(mesh=name).config
    assert norm > 10 * config.optimizer.clip
    for got, grad in zip(jax.tree.leaves(first_moments(after)), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(
            got, (1 - config.optimizer.beta1) * config.optimizer.clip / norm * np.asarray(grad), rtol=1e-4
        )


@pytest.mark.slow
def test_the_norm_that_is_told_is_the_one_that_clips():
    """Frozen parameters have gradients that nobody uses."""
    overrides = {"mesh": "1x1", "lr_rules": "embed=frozen,norm=frozen"}
    state = shared.trainer(**overrides).init()
    grads = noise(state.params)
    grads["transformer/embed"] = like(grads["transformer/embed"], 1e3)
    _, metrics = apply(**overrides)(state, FINE, grads, np.int32(0))
    learning = {module: leaves for module, leaves in grads.items() if not module.endswith(("embed", "norm"))}
    assert abs(float(metrics.grad_norm) / float(optax.tree.norm(learning)) - 1) < 1e-6


@pytest.mark.slow
def test_examples_gradients_are_those_of_what_learns():
    frozen, t = shared.trainer(lr_rules="embed=frozen,up*=frozen", mesh="2x1"), shared.trainer(mesh="2x1")
    gradients = ExampleGradients(frozen.config)
    gradients.prepare(None, Evaluator(frozen, None), None, None)
    told = gradients.read(frozen.init(), frozen.to_devices(shared.batch()))
    squares = numpy(jax.jit(Measures(t.model).example_square_norms)(t.init().params, shared.batch(), t.dropout_key(0)))
    learning = {
        module: {name: leaf for name, leaf in leaves.items() if name not in ("up", "up_bias")}
        for module, leaves in squares.items()
        if not module.endswith("/embed")
    }
    norms, of_all = ([np.sqrt(leaf).T for leaf in summed(tree)] for tree in (learning, squares))
    np.testing.assert_allclose(told["example_norm_mean"], norms[0].mean(), rtol=1e-5)
    np.testing.assert_allclose(told["example_norm_layer_0"], norms[1][0].mean(), rtol=1e-5)
    assert norms[0].mean() < 0.99 * of_all[0].mean()
    assert norms[1][0].mean() < of_all[1][0].mean()


def summed(squares):
    """Over all parameters, [B], and over those of each layer, [B, L]."""
    by_layer = sum(leaf for leaf in jax.tree.leaves(squares) if leaf.ndim > 1)
    return by_layer.sum(1) + sum(leaf for leaf in jax.tree.leaves(squares) if leaf.ndim == 1), by_layer


def test_a_norm_taken_within_a_shard_is_another():
    t = shared.trainer(mesh="1x8")
    grads = noise(t.model.init(0))
    local = sharded.on_mesh(
        lambda grads: optax.tree.norm(grads).reshape(1), (1, 8), (t.model.specs,), P("mp"), check_vma=False
    )
    norms, true = np.asarray(local(grads)), float(jax.jit(optax.tree.norm)(grads))
    assert len(set(norms.tolist())) > 1
    assert norms.max() < 0.8 * true


def test_small_gradients_are_left_alone():
    state = shared.trainer(mesh="1x1").init()
    grads = noise(state.params, 1e-6)
    after, _ = apply(mesh="1x1")(state, FINE, grads, np.int32(0))
    beta1 = shared.trainer(mesh="1x1").config.optimizer.beta1
    expected = jax.tree.map(lambda g: (1 - beta1) * np.asarray(g), grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), numpy(first_moments(after)), expected)


# Decay.


@pytest.mark.parametrize(
    ("overrides", "decayed"),
    [(GPT2, {"tokens", "q", "k", "v", "o", "up", "down"}), ({}, {"tokens", "q", "k", "v", "o", "up", "down", "w"}),
     ({"positions": "t5", "norm": "rmsnorm", "bias": "none", "activation": "swiglu"},
      {"tokens", "q", "k", "v", "o", "up", "gate", "down", "w"})],
    ids=["GPT-2", "tiny", "T5, gated"],
)  # fmt: skip
def test_matrices_decay_and_norms_biases_and_positions_do_not(overrides, decayed):
    config = shared.tiny(mesh="1x1", **overrides)
    optimizer = optim.make_optimizer(config)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), Model.abstract_parameters(config))
    update = jax.jit(lambda grads, state, params: optimizer.update(grads, state, params, step=jnp.int32(10))[0])
    updates = update(like(params, 0), optimizer.init(params), params)
    rate = float(optim.learning_rate(config)(10))
    names, flat = set(), set()
    for leaves in updates.values():
        for name, update in leaves.items():
            names.add(name)
            flat |= {name} if update.ndim >= 2 and name not in decayed else set()
            np.testing.assert_allclose(
                update, -rate * config.optimizer.weight_decay if name in decayed else 0, rtol=1e-5
            )
    assert decayed < names
    if overrides is GPT2:  # a mask by rank would decay these: stacked biases are matrices
        assert flat == {"scale", "offset", "q_bias", "k_bias", "v_bias", "up_bias", "o_bias", "down_bias", "positions"}


def test_both_factors_of_an_adapter_decay():
    config = shared.tiny(mesh="1x1", lora_rank=2)
    optimizer, names = optim.make_optimizer(config), {"q_lora_in", "q_lora_out", "v_lora_in", "v_lora_out"}
    params = {"transformer/layers": {name: jnp.ones((2, 4, 4)) for name in names}}
    updates, _ = optimizer.update(like(params, 0), optimizer.init(params), params, step=jnp.int32(10))
    for name in names:
        decay = -float(optim.learning_rate(config)(10)) * config.optimizer.weight_decay
        np.testing.assert_allclose(updates["transformer/layers"][name], decay, rtol=1e-5)


# Depth.


def program(**overrides):
    """The text of a lowered step."""
    config = shared.tiny(mesh="4x2", **overrides)
    t = Trainer(config, mesh.make(config))
    return t.lower(t.abstract, t.abstract_batch)[0].as_text()


@pytest.mark.slow
def test_a_scanned_program_does_not_grow_with_its_layers():
    def lines(**overrides):
        return len(program(**overrides).splitlines())

    shallow = lines(layers=4)
    assert lines(layers=48) <= 1.05 * shallow
    assert lines(layers=48, remat="full", dropout=0.1) <= 1.05 * lines(layers=4, remat="full", dropout=0.1)
    assert lines(layers=8, scan=False) > 1.4 * lines(layers=4, scan=False)
