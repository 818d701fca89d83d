"""optimizer=muon against optax's own muon on one whole matrix at a time, on every mesh; normuon by its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from shardformer import exact, optim
from shardformer.analysis import traced
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.model.task_on_mesh import with_shardings
from shardformer.optim import muon, rules
from tests import asserts, shared
from tests.optim import trees

MATRICES = ("q", "up", "down")
SETTINGS = {"optimizer": "muon", "clip": 0.0}


def muon_alone(settings, matrix, gradients):
    """optax.contrib.muon of a single [rows, columns] matrix."""
    optimizer = contrib.muon(
        optim.learning_rate(settings), weight_decay=settings.optimizer.weight_decay, consistent_rms=0.2
    )  # its schedule counts by itself: as long as no step is left out, that is the same
    state = optimizer.init(matrix)
    with jax.numpy_dtype_promotion("standard"):
        for gradient in gradients:
            updates, state = jax.jit(optimizer.update)(gradient, state, matrix)
            matrix = optax.apply_updates(matrix, updates)
    return matrix


@pytest.fixture(scope="module")
def expected():
    """Each layer's matrices by muon alone; everything else by adamw."""
    settings = trees.config(**SETTINGS)
    decayed = {module: {name: name in {"tokens", "w"} for name in leaves} for module, leaves in trees.SHAPES.items()}
    params = trees.plain(
        optax.adamw(optim.learning_rate(settings), settings.optimizer.beta1, settings.optimizer.beta2,
                    weight_decay=settings.optimizer.weight_decay, mask=decayed)
    )  # fmt: skip
    start, gradients = (
        trees.tree(0)["transformer/layers"],
        [trees.tree(step + 1)["transformer/layers"] for step in range(trees.STEPS)],
    )
    for name in MATRICES:
        params["transformer/layers"][name] = jnp.stack(
            [muon_alone(settings, start[name][i], [gradient[name][i] for gradient in gradients]) for i in range(2)]
        )
    return params


@pytest.mark.slow
def test_five_steps_equal_muon_on_each_layer_alone(expected):
    """On one mesh; tests/integration/test_cookbook.py takes the steps of a trainer exactly, on all four."""
    settings = trees.config(mesh="2x4", **SETTINGS)
    got, state = trees.ours(settings)
    assert max(trees.errors(got, expected).values()) < 1e-5
    assert min(trees.errors(got, trees.tree(0)).values()) > 1e-3
    momentum = optax.tree.get(state[1].inner_states["muon"], "mu")["transformer/layers"]["q"]
    assert momentum.addressable_shards[0].data.shape == (2, 8, 8 // settings.parallel.mp)


@pytest.mark.slow
def test_a_shard_s_part_alone_would_be_another_update(expected):
    """The twin: each of four shards makes its own columns orthogonal."""
    settings = trees.config(**SETTINGS)
    start = trees.tree(0)["transformer/layers"]["up"][0]
    gradients = [trees.tree(step + 1)["transformer/layers"]["up"][0] for step in range(trees.STEPS)]
    parts = [
        muon_alone(settings, part, gradient_parts)
        for part, *gradient_parts in zip(*[jnp.split(x, 4, axis=1) for x in (start, *gradients)], strict=True)
    ]
    assert asserts.relative(jnp.concatenate(parts, axis=1), expected["transformer/layers"]["up"][0]) > 1e-3


@pytest.mark.slow
def test_an_update_is_as_large_as_adam_s():
    """So that lr and weight_decay mean the same: every matrix has the RMS of 0.2, and no direction prevails."""
    settings = trees.config(**SETTINGS)
    optimizer = optim.make_optimizer(settings)
    params = jax.tree.map(jnp.zeros_like, trees.tree(0))
    updates, _ = jax.jit(optimizer.update)(trees.tree(1), optimizer.init(params), params, step=jnp.int32(2))
    for name in MATRICES:
        stacked = np.asarray(updates["transformer/layers"][name]) / settings.optimizer.lr
        assert 0.14 < np.sqrt(np.mean(stacked**2)) < 0.26
        for matrix in stacked:
            singular = np.linalg.svd(matrix, compute_uv=False)
            assert singular.max() < 3 * singular.min()


@pytest.mark.slow
def test_rules_apply_to_muon_too():
    settings = trees.config(**SETTINGS)
    once, _ = trees.ours(settings)
    got, state = trees.ours(settings.replace(lr_rules="up=frozen,up_bias=frozen,layers/q=2x"))
    moved = trees.errors(got, trees.tree(0))
    assert moved["transformer/layers/up"] == moved["transformer/layers/up_bias"] == 0
    assert trees.errors(got, once)["transformer/layers/down"] < 1e-6
    assert trees.errors(got, once)["transformer/layers/q"] > 1e-3
    kept = [rules.full_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert [name for name in kept if name.endswith("layers/down")]
    assert not [name for name in kept if name.endswith(("layers/up", "layers/up_bias"))]


@pytest.mark.slow
def test_a_trainer_learns_with_it():
    trainer = shared.trainer(optimizer="muon", lr=1e-2, layers=1, bias="none", positions="none")
    state, losses = trainer.init(), []
    for step in range(5):
        state, metrics = trainer.step(state, shared.batch(), step)
        losses.append(trainer.read_metrics(metrics).loss)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


EXPERTS = {"bias": "none", "activation": "swiglu", "d_ff": 24, "shared_width": 8, "weight_decay": 0.0, **SETTINGS}


def orthogonalise(matrix):
    """Returns five Newton-Schulz iterations with Muon's coefficients (Keller Jordan), in float64."""
    x = np.asarray(matrix, np.float64)
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def first_update(**options):
    """Returns (the gradients, the update of the first step divided by the rate) of a layer's matrices."""
    model = traced.make_trainer(shared.tiny(**EXPERTS | options)).model
    optimizer = optim.make_optimizer(model.config, model.map_matrices)
    draw = np.random.default_rng(0)
    grads = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape).astype(np.float32), model.shapes)

    def update(grads):
        return optimizer.update(grads, optimizer.init(grads), grads, step=jnp.int32(2))[0]

    rate = float(optim.learning_rate(model.config)(jnp.int32(2)))
    split = with_shardings(model.shapes, jax.tree.map(model.sharding, model.grad_specs))
    updates = exact.run(update, grads, shapes=(split,)).outputs["transformer/layers"]
    return grads["transformer/layers"], {name: -leaf / rate for name, leaf in updates.items()}


@pytest.mark.parametrize(
    "options",
    [{"mesh": "2x4", "experts": 4}, {"mesh": "2x4", "experts": 6, "zero": 1}, {"mesh": "8x1", "experts": 8, "zero": 1}],
    ids=str,
)
def test_each_expert_is_one_matrix(options):
    grads, updates = first_update(**options)
    for name in ("expert_up", "expert_gate", "expert_down", "shared_up", "q"):
        stacked = grads[name].reshape(-1, *grads[name].shape[-2:])
        size = 0.2 * np.sqrt(max(stacked.shape[1:]))
        want = np.stack([size * orthogonalise(matrix) for matrix in stacked]).reshape(grads[name].shape)
        assert asserts.relative(updates[name], want) < 1e-6  # Muon's coefficients are constants of float32
    rows = grads["expert_up"][0].reshape(-1, grads["expert_up"].shape[-1])  # all experts of a layer as one matrix
    together = 0.2 * np.sqrt(max(grads["expert_up"].shape[-2:])) * orthogonalise(rows)
    assert asserts.relative(updates["expert_up"][0].reshape(rows.shape), together) > 0.1


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_adapters_are_not_for_muon(name):
    with pytest.raises(UsageError, match=f"optimizer={name} updates full matrices, but lora_rank trains adapters"):
        Config.of(optimizer=name, lora_rank=4)


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_momentum_decays_by_its_key(name):
    gradients = trees.tree(1)
    for momentum in (0.95, 0.5):
        optimizer = optim.make_optimizer(trees.config(**SETTINGS | {"optimizer": name, "momentum": momentum}))

        def follow(gradients, optimizer=optimizer):
            state = optimizer.update(gradients, optimizer.init(gradients), gradients, step=jnp.int32(2))[1]
            return optax.tree.get(state[1].inner_states["muon"], "mu")["transformer/layers"]["q"]

        expected = (1 - momentum) * np.asarray(gradients["transformer/layers"]["q"])
        np.testing.assert_allclose(exact.run(follow, gradients).outputs, expected, rtol=1e-6)


def balance(orthogonal, axis):
    """Returns NorMuon's updates from orthogonal ones of two or more steps (arXiv:2510.05491, algorithm 1)."""
    second = np.zeros(np.mean(orthogonal[0], axis=axis, keepdims=True).shape)
    for matrix in orthogonal:
        second = 0.95 * second + 0.05 * np.mean(matrix**2, axis=axis, keepdims=True)
        update = matrix / np.sqrt(second)
        yield 0.2 * np.sqrt(update.size) / np.linalg.norm(update) * update


def test_normuon_divides_by_the_mean_square_of_each_output():
    draw = np.random.default_rng(0)
    steps = [draw.normal(size=(3, 6, 4)) * np.arange(1, 5) for _ in range(2)]  # three matrices [6, 4]
    transform = muon.balance_outputs()
    state = transform.init(jnp.zeros((3, 6, 4)))
    assert state.shape == (3, 1, 4)
    got = []
    for step in steps:
        updates, state = transform.update(jnp.float32(step), state)
        got.append(np.asarray(updates))
    for layer in range(3):
        matrices = [step[layer] for step in steps]
        for one, of_outputs, of_inputs in zip(got, balance(matrices, 0), balance(matrices, 1), strict=True):
            assert asserts.relative(one[layer], of_outputs) < 1e-5
            assert asserts.relative(one[layer], of_inputs) > 0.1


def test_output_without_gradients_stays():
    matrix = np.ones((1, 6, 4)) * [1.0, 0.0, 1.0, 1.0]
    transform = muon.balance_outputs()
    updates, _ = transform.update(jnp.float32(matrix), transform.init(jnp.float32(matrix)))
    assert np.asarray(updates)[0, 0, 1] == 0 < np.asarray(updates)[0, 0, 0]


def test_normuon_balances_the_updates_of_muon():
    params, gradients, first = trees.tree(0), trees.tree(1), {}
    for name in ("muon", "normuon"):
        settings = trees.config(**SETTINGS | {"optimizer": name, "weight_decay": 0.0})
        optimizer = optim.make_optimizer(settings)

        def update(gradients, params, optimizer=optimizer):
            return optimizer.update(gradients, optimizer.init(params), params, step=jnp.int32(2))[0]

        rate = float(optim.learning_rate(settings)(2))
        first[name] = {
            rules.full_name(path): np.asarray(leaf) / -rate
            for path, leaf in jax.tree_util.tree_leaves_with_path(exact.run(update, gradients, params).outputs)
        }
    for name, plain in first["muon"].items():
        balanced = first["normuon"][name]
        if name.split("/")[-1] not in MATRICES:
            np.testing.assert_array_equal(balanced, plain)
            continue
        for matrix, of_muon in zip(balanced, plain, strict=True):
            outputs = np.sqrt(np.mean(matrix**2, axis=0))
            np.testing.assert_allclose(outputs, 0.2, rtol=1e-4)  # of the first step
            assert np.ptp(np.sqrt(np.mean(of_muon**2, axis=0))) > 0.01
