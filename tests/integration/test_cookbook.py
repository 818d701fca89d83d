"""The optimization cookbook under the mesh: every recipe, with every other, is the plain dense update."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer.adapters import adapter_keys, lora
from shardformer.analysis import traced, verify_exact
from shardformer.config import check_zero
from shardformer.errors import UsageError
from shardformer.model import Decoder, task_on_mesh
from shardformer.optim import chain
from shardformer.parallel.microbatch import AccumulationType, microbatch
from shardformer.training.trainer import Trainer
from tests import asserts, meshes, reference_update, shared, tiers

STEPS = 3
ROUNDED_CONSTANTS = 1e-6  # the rates and factors of the program are float32, those of the plain update are not
RECIPES = {
    "ema": {"ema": 0.9},
    "lora": {"lora_rank": 4, "lora_targets": "q,v,o,up,down"},
    "rules": {"lr_rules": "*_bias=10x,*/embed/*=0.1x"},
    "frozen": {"lr_rules": "norm=frozen,k=frozen"},
    "lbfgs": {"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0},
    "muon": {"optimizer": "muon"},
}
OF_ADAPTERS = {"rules": {"lr_rules": "*/q_lora_*=10x,*_lora_in=2x"}, "frozen": {"lr_rules": "q_lora_in=frozen"}}
# What these rules mean, by full names: a word is one whole component of a name.
FACTORS = {
    "rules": lambda name: 10.0 if name.endswith("_bias") else 0.1 if "/embed/" in name else 1.0,
    "frozen": lambda name: 0.0 if "/norm/" in name or name.endswith("/k") else 1.0,
}
FACTORS_OF_ADAPTERS = {
    "rules": lambda name: 10.0 if "/q_lora_" in name else 2.0 if name.endswith("_lora_in") else 1.0,
    "frozen": lambda name: 0.0 if name.endswith("/q_lora_in") else 1.0,
}
WAYS = ("whole", "scan", "multisteps", "manual")
# Every pair of (mesh, way to accumulate, ZeRO, recipe, recipe) that the configuration admits is in one of these rows,
# with few different recipes in all: each takes a dense twin.
MATRIX = (
    ("4x2", "multisteps", 3, "ema frozen muon"),
    ("8x1", "whole", 3, "ema lora frozen lbfgs"),
    ("1x8", "whole", 0, "ema lora frozen lbfgs"),
    ("1x8", "scan", 0, "ema lora"),
    ("1x8", "multisteps", 0, "ema rules muon"),
    ("1x8", "manual", 0, "ema lora"),
    ("2x4", "whole", 1, "ema lora frozen lbfgs"),
    ("2x4", "scan", 0, "ema frozen muon"),
    ("2x4", "multisteps", 1, "ema lora"),
    ("2x4", "manual", 3, "ema lora rules"),
    ("4x2", "whole", 0, "ema lora frozen lbfgs"),
    ("4x2", "scan", 1, "ema lora rules"),
    ("4x2", "manual", 3, "ema lora"),
    ("8x1", "whole", 0, "ema rules muon"),
    ("8x1", "scan", 3, "ema lora"),
    ("8x1", "multisteps", 3, "ema lora rules"),
    ("8x1", "manual", 1, "ema frozen muon"),
)


def overrides_of(accumulated, zero, recipes):
    rows = 2 if accumulated != "whole" else 1
    in_chunks = {"loss_chunk": 5} if accumulated in ("whole", "manual") else {}
    cut = {} if rows == 1 else {"accum": rows, "accum_mode": accumulated}
    known = RECIPES | OF_ADAPTERS if "lora" in recipes.split() else RECIPES
    together = {key: value for recipe in recipes.split() for key, value in known[recipe].items()}
    return {"batch": 16, "zero": zero} | in_chunks | cut | together


def pairs(mesh, accumulated, zero, recipes):
    """Returns all pairs of the entries of a row."""
    every = [("mesh", mesh), ("accumulated", accumulated), ("zero", zero), *(("recipe", it) for it in recipes.split())]
    return set(itertools.combinations(every, 2))


@functools.cache
def admitted_pairs():
    some = ["", *RECIPES, *map(" ".join, itertools.combinations(RECIPES, 2))]
    rows = itertools.product(shared.MESHES, WAYS, (0, 1, 3), some)
    return set().union(*(pairs(*row) for row in rows if is_admitted(*row)))


def missed(matrix):
    return admitted_pairs() - set().union(*(pairs(*row) for row in matrix))


def is_admitted(mesh, accumulated, zero, recipes):
    keys = [key for recipe in recipes.split() for key in RECIPES[recipe]]
    try:
        check_zero(shared.tiny(mesh=mesh, **overrides_of(accumulated, zero, recipes)))
    except UsageError:
        return False
    return len(set(keys)) == len(keys)  # else one would take the place of the other


@pytest.mark.slow
def test_every_pair_that_is_admitted_is_in_the_matrix():
    assert missed(MATRIX) == set()


@functools.cache
def initial_parameters(layers, lora_rank, lora_targets):
    """Adapters already do something, so that both of their factors have a gradient."""
    keys = {"lora_rank": lora_rank, "lora_targets": lora_targets} if lora_rank else {}
    params = shared.on_host(shared.trainer(mesh="1x1", layers=layers, **keys).model.init(0))
    random = np.random.default_rng(0)  # the same at every place: a constant would vanish in the next norm

    def nudge(name, leaf):
        return random.normal(0, 0.05, leaf.shape).astype("f4") if name.endswith(lora.OUT) else leaf

    return {m: {n: nudge(n, leaf) for n, leaf in leaves.items()} for m, leaves in params.items()}


def start(**overrides):
    """The initial state; what it is made of is the same for all recipes of one model."""
    trainer = shared.trainer(**overrides)
    c = trainer.config
    return trainer.start(
        jax.device_put(
            initial_parameters(c.model.layers, c.lora.lora_rank, c.lora.lora_targets), trainer.model.shardings
        )
    )


def sharded_exactly(**overrides):
    """Parameters and average after some steps of the trainer in float64."""
    trainer = traced.make_trainer(shared.tiny(**overrides))
    params = verify_exact.draw_parameters(trainer.config)
    state, metrics = verify_exact.run_steps(trainer, params, list(map(draw_batch, range(STEPS))))
    assert np.isfinite(metrics).all()
    assert int(state.step) == STEPS
    return state.params, state.average


def recipe_of(recipes):
    """Returns the recipe of the reference update."""
    words = recipes.split()
    factors = FACTORS_OF_ADAPTERS if "lora" in words else FACTORS
    return reference_update.Recipe(
        factor=next((factors[word] for word in words if word in factors), lambda name: 1.0),
        optimizer=next((word for word in words if word in ("lbfgs", "muon")), "adamw"),
        ema=0.9 if "ema" in words else 0.0,
        lora="lora" in words,
    )


@functools.cache
def dense(recipes):
    """(parameters, average) by full names, after the same steps of the dense model on one device."""
    config = shared.tiny(mesh="1x1", **overrides_of("whole", 0, recipes))
    parameters = reference_update.flatten(verify_exact.draw_parameters(config))
    return reference_update.train(config, recipe_of(recipes), parameters, list(map(draw_batch, range(STEPS))))


def draw_batch(step):
    return shared.batch(step, rows=16)


@pytest.mark.parametrize(
    ("mesh", "accumulated", "zero", "recipes"),
    tiers.shorten(MATRIX, 2),
)
def test_is_the_plain_dense_update(mesh, accumulated, zero, recipes):
    overrides = overrides_of(accumulated, zero, recipes)
    got = tuple(map(reference_update.flatten, sharded_exactly(mesh=mesh, **overrides)))
    assert asserts.worst_relative(got, dense(recipes)) < ROUNDED_CONSTANTS


def test_a_rule_that_catches_another_name_is_seen():
    """Read as a part of a name, "k" would freeze embed/tokens too."""
    after, _ = dense("ema frozen muon")
    start_of = reference_update.flatten(verify_exact.draw_parameters(shared.tiny(mesh="1x1")))
    assert asserts.relative(start_of["transformer/embed/tokens"], after["transformer/embed/tokens"]) > 1e-3
    assert np.array_equal(start_of["transformer/layers/k"], after["transformer/layers/k"])


@pytest.mark.slow
def test_frozen_weights_beside_adapters_are_unchanged():
    overrides = {"mesh": "4x2", **overrides_of("manual", 3, "ema lora")}
    before, (after, _) = verify_exact.draw_parameters(shared.tiny(**overrides)), sharded_exactly(**overrides)
    for module, leaves in before.items():
        for name, leaf in leaves.items():
            assert np.array_equal(leaf, after[module][name]) != adapter_keys.is_adapter(name), name


@pytest.mark.slow
def test_merged_adapters_give_the_same_logits():
    overrides = {"mesh": "4x2", **overrides_of("manual", 3, "ema lora")}
    adapted, plain = shared.trainer(**overrides).model, shared.trainer(mesh="4x2").model
    params = start(**overrides).params
    merged = {module: lora.merge_adapters(leaves, adapted.config) for module, leaves in params.items()}
    tokens = shared.batch(0, rows=16)["tokens"]
    logits = [
        np.asarray(jax.jit(Decoder(model).logits)(p, tokens))[..., : shared.VOCAB]
        for model, p in ((adapted, params), (plain, merged))
    ]
    assert asserts.relative(*logits) < 1e-6
    untouched = jax.jit(Decoder(plain).logits)(adapter_keys.remove_adapters(params), tokens)[..., : shared.VOCAB]
    assert asserts.relative(untouched, logits[0]) > 1e-3


# What would be wrong -------------------------------------------------------------------------------------------------


def test_a_sum_for_a_mean_is_seen(broken):
    """In the gradient itself: a clip that binds, or adam, would hide a factor."""
    config = shared.tiny(mesh="4x2", batch=16, accum=2)
    expected = meshes.compute_on_one_device(meshes.simplify(config)).gradients
    assert asserts.worst_relative(meshes.compute_gradients(config).gradients, expected) < meshes.EXACT
    broken(task_on_mesh, "microbatch", summed_microbatch)
    assert asserts.worst_relative(meshes.compute_gradients(config).gradients, expected) > 0.5


def summed_microbatch(fun, argnums, microbatch_size, accumulator):
    return microbatch(fun, argnums, microbatch_size, AccumulationType.SUM)


def test_a_schedule_that_steps_with_every_part_is_seen():
    """A counter inside of MultiSteps advances once for a batch; one outside, once for each of its parts."""

    def rate(count):
        return 1 / (1 + jnp.float32(count))

    inside = chain.accumulate_over_calls(optax.sgd(rate), 2)
    outside = optax.chain(chain.accumulate_over_calls(optax.sgd(1.0), 2), optax.scale_by_schedule(rate))
    travelled = []
    for optimizer in (inside, outside):
        x = jnp.float32(0)
        state = optimizer.init(x)
        for _ in range(4):
            update, state = optimizer.update(jnp.float32(1), state, x)
            x = x + update
        travelled.append(float(x))
    assert travelled[0] == -1.5
    assert travelled[1] != -1.5


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))


@pytest.mark.slow
def test_a_norm_taken_of_a_part_is_seen():
    """With ZeRO each device holds a part of the gradient; clipping by a part's norm would be another update."""
    overrides = {"mesh": "4x2", "batch": 16, "zero": 1}
    trainer = shared.trainer(**overrides)
    _, grads = jax.jit(trainer.model.loss_and_grad)(
        start(**overrides).params, shared.batch(0, rows=16), trainer.dropout_key(0)
    )
    whole = norm(shared.on_host(grads))
    of_a_part = norm(jax.tree.map(lambda g: np.asarray(g.addressable_shards[0].data), grads))
    assert of_a_part < 0.6 * whole


# ZeRO ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "zero"), [("8x1", 1), ("8x1", 3), ("4x2", 1), ("4x2", 3)])
def test_zero_splits_what_it_says_over_dp(mesh, zero):
    trainer = shared.trainer(mesh=mesh, zero=zero)
    dp, mp = trainer.config.parallel.dp, trainer.config.parallel.mp
    for part, parts in (("params", dp * mp), ("optimizer", dp * mp)):
        leaves = jax.tree.leaves(getattr(trainer.abstract, part))
        whole = sum(leaf.size for leaf in leaves)
        held = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
        assert whole / parts <= held < 1.05 * whole / parts


# A number that is none -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["multisteps", "manual"])
def test_a_part_that_is_no_number_takes_its_step_with_it(broken, mode):
    """Its gradient alone breaks, in one part of four: the step is reported, and the state is that of its start."""
    overrides = {"mesh": "4x2", "batch": 16, "accum": 4, "accum_mode": mode, "zero": 1}
    trainer = Trainer(shared.trainer(**overrides).config, shared.trainer(**overrides).model.mesh)
    whole = trainer.model.loss_and_grad_of_part

    def add_infinity(params, batch, key, part):
        losses, grads = whole(params, batch, key, part)
        return losses, jax.tree.map(lambda g: jnp.where(part == 1, jnp.inf, g), grads)

    broken(trainer.model, "loss_and_grad_of_part", add_infinity)
    before = shared.on_host(start(**overrides))
    after, metrics = trainer.step(start(**overrides), shared.batch(0, rows=16), 0)
    assert not np.isfinite(np.asarray(metrics)).all()
    jax.tree.map(np.testing.assert_array_equal, shared.on_host(after), before)
