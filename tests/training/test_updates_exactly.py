"""Updates in float64, against their formulas in NumPy: adamw, its limit, its decay, the guard, averages and offload."""

import functools

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced, verify_exact
from shardformer.config.names import LAYERS, ROUTER_BIAS
from shardformer.model import Loss, Model
from shardformer.training.step import add_if_finite
from tests import shared

SIZES = {"layers": 2, "d_model": 16, "heads": 4, "d_ff": 16, "seq": 8, "batch": 4, "mesh": "2x2", "positions": "none"}
RATES = {"lr": 0.03, "lr_min": 0.01, "warmup": 2, "decay_steps": 9, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2}
KEYS = SIZES | RATES | {"clip": 0.5, "bias": "all", "tied": True}
MATRICES = ("tokens", "q", "k", "v", "o", "up", "down")
BAD = 1  # the number of the step that is not applied


@functools.cache
def make_trainer(**changes):
    return traced.make_trainer(shared.tiny(**KEYS | changes))


def draw_gradients(trainer, steps: int = 3) -> list:
    """Returns gradients like the trainer's, of which the first is larger than the limit and the others are smaller."""
    draw = np.random.default_rng(1)

    def draw_leaf(scale, shape):
        return (scale * draw.standard_normal(shape.shape)).astype(np.float32)

    shapes = trainer.model.trainable.select(trainer.model.shapes)
    return [jax.tree.map(functools.partial(draw_leaf, scale), shapes) for scale in (0.5, *[1e-3] * (steps - 1))]


def apply(trainer, gradients: list, losses=(1.0, 1.0, 1.0), numbers=None, change=lambda state: state):
    """Returns the first state, and the state and the metrics after each update; `change` acts on the first state."""
    params = verify_exact.draw_parameters(trainer.config)
    state = exact.run(trainer.update.start, params, shapes=(trainer.model.shapes,)).outputs
    shapes = trainer.abstract, Loss(*[jax.ShapeDtypeStruct((), np.float32)] * 3), trainer.model.trainable.select(
        Model.abstract_parameters(trainer.config)
    ), jax.ShapeDtypeStruct((), np.int32)  # fmt: skip
    state = change(state)
    result = [(state, None)]
    for step, (grads, loss) in enumerate(zip(gradients, losses, strict=False)):
        number = step if numbers is None else numbers[step]
        arguments = state, Loss(*[np.float32(loss)] * 3), grads, np.int32(number)
        state, metrics = exact.run(trainer.update.apply, *arguments, shapes=shapes).outputs
        result.append((state, metrics))
    return result


def rate(step: int) -> float:
    """Returns the rate: half of it, all of it, and then a cosine."""
    if step < 2:
        return 0.03 * (step + 1) / 2
    return 0.01 + 0.02 * (1 + np.cos(np.pi * (step - 2) / 7)) / 2


def name(path) -> str:
    return path[-1].key


def measure_norm(tree) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree))))


def compute_adamw(params, gradients: list, is_frozen=lambda leaf: False, find_factor=lambda leaf: 1.0):
    """Returns the parameters after these updates, by the formulas of Adam and of its decoupled decay.

    `find_factor` returns the factor of a leaf's rate.
    """
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    first, second = (jax.tree.map(np.zeros_like, params) for _ in range(2))
    for step, grads in enumerate(gradients):
        learned = [leaf for path, leaf in jax.tree.leaves_with_path(grads) if not is_frozen(name(path))]
        factor = min(1.0, 0.5 / measure_norm(learned))
        first = jax.tree.map(lambda m, g, f=factor: 0.8 * m + 0.2 * f * g, first, grads)
        second = jax.tree.map(lambda v, g, f=factor: 0.9 * v + 0.1 * (f * g) ** 2, second, grads)

        def move(path, p, m, v, step=step):
            if is_frozen(name(path)):
                return p
            direction = m / (1 - 0.8 ** (step + 1)) / (np.sqrt(v / (1 - 0.9 ** (step + 1))) + 1e-8)
            return p - rate(step) * find_factor(name(path)) * (direction + 0.2 * p * (name(path) in MATRICES))

        params = jax.tree.map_with_path(move, params, first, second)
    return params


def assert_close(got, expected, bound: float = 1e-6) -> None:
    """Compares with formulas whose constants have more digits than the float32 ones of the program."""
    for (path, want), leaf in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        want = np.asarray(want, np.float64)
        off = np.abs(np.asarray(leaf, np.float64) - want).max(initial=0) / np.abs(want).max(initial=1e-30)
        assert off <= bound, f"{jax.tree_util.keystr(path)} is off by {off:.1e}"


@pytest.mark.parametrize("mesh", ["2x2", "1x1"])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_update_is_that_of_the_formulas(mesh, offload):
    """With two layers, offload updates one after the other with the same count of steps."""
    trainer = make_trainer(mesh=mesh, offload=offload)
    gradients = draw_gradients(trainer)
    states = apply(trainer, gradients)
    assert_close(states[-1][0].params, compute_adamw(states[0][0].params, gradients))
    norms = [float(metrics[3]) for _, metrics in states[1:]]
    assert norms == pytest.approx([measure_norm(grads) for grads in gradients], rel=1e-6)


def test_frozen_parameters_do_not_count_in_the_norm():
    trainer = make_trainer(lr_rules="up=frozen")
    gradients = draw_gradients(trainer)
    states = apply(trainer, gradients)
    expected = compute_adamw(states[0][0].params, gradients, lambda leaf: leaf == "up")
    assert_close(states[-1][0].params, expected)


def test_rules_multiply_the_rate():
    trainer = make_trainer(lr_rules="up=0.5x,*bias=3x")
    gradients = draw_gradients(trainer)
    states = apply(trainer, gradients)

    def find_factor(leaf):
        return 0.5 if leaf == "up" else 3.0 if leaf.endswith("bias") else 1.0

    expected = compute_adamw(states[0][0].params, gradients, find_factor=find_factor)
    assert_close(states[-1][0].params, expected)


def test_counts_of_experts_do_not_count_in_the_norm():
    trainer = make_trainer(experts=4, bias="none", balance_rate=0.1)
    gradients = draw_gradients(trainer, 1)
    gradients[0][LAYERS][ROUTER_BIAS][...] = [[-2, 0, 1, 1], [0, 3, 0, -3]]
    (first, _), (state, metrics) = apply(trainer, gradients)
    moved = state.params[LAYERS][ROUTER_BIAS] - first.params[LAYERS][ROUTER_BIAS]
    assert_close(moved, 0.1 * np.array([[1, 0, -1, -1], [0, -1, 0, 1]]))
    others = [leaf for path, leaf in jax.tree.leaves_with_path(gradients[0]) if name(path) != ROUTER_BIAS]
    assert float(metrics[3]) == pytest.approx(measure_norm(others), rel=1e-6)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_average_is_of_the_parameters_after_each_step(offload):
    trainer = make_trainer(ema=0.6, offload=offload)
    states = apply(trainer, draw_gradients(trainer))
    weights = 0.6 ** np.arange(3)[::-1]
    after = [state.params for state, _ in states[1:]]
    expected = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=weights), *after)
    assert_close(states[-1][0].average, expected)


def list_changed(before, after) -> list[str]:
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return [jax.tree_util.keystr(path) for (path, a), b in pairs if not np.array_equal(a, b)]


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("reason", ["loss", "gradient", "number"])
def test_bad_step_changes_nothing(offload, reason):
    """The state is the same after a loss or a gradient that is not finite, and after the batch of another step."""
    trainer = make_trainer(ema=0.6, offload=offload)
    gradients, losses, numbers = draw_gradients(trainer, 2), [1.0, 1.0], [0, BAD]
    if reason == "gradient":
        gradients[BAD][LAYERS]["q"][1, 0, 0] = np.nan
    losses[BAD] = np.inf if reason == "loss" else 1.0
    numbers[BAD] = 7 if reason == "number" else BAD
    _, (good, _), (bad, _) = apply(trainer, gradients, losses, numbers)
    assert list_changed(good, bad) == []
    assert int(good.step) == 1


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_masters_add_up_what_bfloat16_would_lose(offload):
    """The masters move as float32 parameters do, whatever the rounded parameters are."""

    def forget_rounded(state):
        zeros = {leaf: np.zeros_like(values) for leaf, values in state.masters[LAYERS].items()}
        return state._replace(params=state.params | {LAYERS: state.params[LAYERS] | zeros})

    stored = {"param_dtype": "bfloat16", "dtype": "bfloat16", "offload": offload}
    trainer, plain = make_trainer(**stored), make_trainer()
    gradients = draw_gradients(plain)
    states = apply(trainer, gradients, change=forget_rounded)
    first = states[0][0]
    expected = compute_adamw(first.params | {LAYERS: first.params[LAYERS] | first.masters[LAYERS]}, gradients)
    masters = states[-1][0].masters[LAYERS]
    assert sorted(masters) == sorted(MATRICES[1:])
    assert_close(masters, {leaf: expected[LAYERS][leaf] for leaf in masters})


def test_weight_that_would_overflow_stays():
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        assert add_if_finite(largest, largest) == largest
    assert add_if_finite(np.float32(1), np.float32(2)) == 3


def test_each_step_has_another_dropout_key():
    update = make_trainer().update
    keys = {tuple(exact.run(update.dropout_key, np.int32(step)).outputs.tolist()) for step in range(5)}
    assert len(keys) == 5
