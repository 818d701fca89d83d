"""Sharded equals dense: the matrix of features and meshes, as data.

All of it is compared exactly, in float64. A few rows are compiled, to show what float32 and XLA make of them.
"""

import functools
import itertools
import os

import jax
import numpy as np
import pytest

from shardformer.analysis import dense_reference as reference
from tests import asserts, meshes, shared, tiers

STEPS = 20
F32 = {"loss": 1e-6, "gradient": 1e-5, "after 20 steps": 1e-4}
BF16 = {"loss": 1e-4, "gradient": 5e-2, "after 20 steps": 1e-2}  # rounding of 8 bits, in another order on each mesh

# Of each pair a row has the one or the other; what neither is (rotary positions, an untied table, ...) is the default.
# The loss in chunks comes with the learned positions; its chunks do not divide a batch.
FEATURES = (
    {"t5": {"positions": "t5", "embed": "bias"}, "learned": {"positions": "learned", "loss_chunk": 5}},
    {"tied": {"tied": True}, "untied": {}},
    {"biases": {"bias": "all"}, "no-bias": {"bias": "none"}},
    {"parallel": {}, "sequential": {"block": "sequential"}},
    {"layernorm": {}, "rmsnorm": {"norm": "rmsnorm", "z_loss": 1e-2}},
    {"certain": {}, "dropout": {"dropout": 0.1}},
    {"scanned": {}, "unrolled": {"scan": False}},
    {"kept": {}, "remat": {"remat": "full"}},
)
DEFAULTS = "parallel layernorm certain scanned kept"  # said by name; what a run has that gives no key
EVERYTHING = "learned untied no-bias sequential rmsnorm dropout unrolled remat"
TIED = "t5 tied biases parallel layernorm certain scanned kept"
# Each mesh has a set of features and all others, so that every feature is on every mesh. Every pair of features is in
# a row.
PAIRWISE = (
    ("2x4", EVERYTHING),
    ("2x4", TIED),
    ("4x2", "t5 tied biases parallel rmsnorm dropout unrolled remat"),
    ("4x2", "learned untied no-bias sequential layernorm certain scanned kept"),
    ("8x1", "t5 tied no-bias sequential layernorm certain unrolled remat"),
    ("8x1", "learned untied biases parallel rmsnorm dropout scanned kept"),
    ("1x8", "t5 untied biases sequential layernorm dropout scanned remat"),
    ("1x8", "learned tied no-bias parallel rmsnorm certain unrolled kept"),
)
BFLOAT16 = (("4x2", "bfloat16"), ("2x4", "bfloat16 sequential learned dropout"))
MATRIX = (("4x2", DEFAULTS), *PAIRWISE)
WITH_STEPS = (DEFAULTS, TIED, "bfloat16")  # a tied table is one of two parameters
# sequence_parallel=true with features of rows above, and with what else a step may do.
TOKENS_SPLIT = (
    ("4x2", "t5 tied biases sequential rmsnorm certain scanned remat", {"zero": 3}),
    ("2x4", EVERYTHING, {"zero": 1, "accum": 2}),
    ("2x4", "t5 tied biases parallel layernorm dropout scanned kept", {"attention": "blocks"}),
    ("1x8", DEFAULTS, {}),
    ("1x2x2", DEFAULTS, {"accum": 2}),
    ("4x2", "bfloat16", {"zero": 1}),
)
# Rows that are compiled as well; EVERYTHING has every feature that the defaults lack.
COMPILED = (
    ("4x2", DEFAULTS, {}),
    ("4x2", "bfloat16", {}),
    ("2x4", EVERYTHING, {"zero": 1, "accum": 2, "sequence_parallel": True}),
)


def results(compiler_options=None, **overrides):
    """Losses of each step and the first step's gradients."""
    run = shared.update_and_grads(**overrides)
    run = jax.jit(run, compiler_options=compiler_options) if compiler_options else run
    state, losses, first = shared.initial_state(**overrides), [], None
    for step in range(STEPS):
        state, metrics, grads = run(state, shared.batch(step), np.int32(step))
        losses.append(float(metrics[0]))
        first = first or shared.on_host(grads)
    assert int(state.step) == STEPS
    return np.array(losses), first


def worst_leaf(got, expected):
    errors = jax.tree.map(asserts.relative, got, expected)
    layers = errors["transformer/layers"]
    if "k_bias" in layers:  # shifts a query's logits all alike: its gradient is zero but for rounding
        everything = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected)))
        k_bias = [tree["transformer/layers"]["k_bias"] for tree in (got, expected)]
        layers["k_bias"] = float(np.linalg.norm(k_bias[0] - k_bias[1]) / everything)
    return max(jax.tree.leaves(errors))


def overrides_of(words: str) -> dict:
    options = {"bfloat16": {"dtype": "bfloat16"}, **{name: keys for pair in FEATURES for name, keys in pair.items()}}
    return {key: value for word in words.split() for key, value in options[word].items()}


@functools.cache
def one_device(words: str):
    return results(mesh="1x1", **overrides_of(words))


@pytest.mark.parametrize(("mesh", "words"), MATRIX + BFLOAT16)
def test_every_mesh_equals_one_device_and_the_plain_model(mesh, words):
    meshes.assert_equals_one_device(with_steps=words in WITH_STEPS, mesh=mesh, **overrides_of(words))


@pytest.mark.parametrize(("mesh", "words", "options"), TOKENS_SPLIT)
def test_tokens_split_over_mp_equal_one_device(mesh, words, options):
    keys = overrides_of(words) | options
    meshes.assert_equals_one_device(
        with_steps={"zero", "accum"} <= options.keys(), mesh=mesh, sequence_parallel=True, **keys
    )


@pytest.mark.parametrize(("mesh", "words", "options"), [*tiers.shorten(COMPILED[:2]), tiers.at_night(COMPILED[2])])
def test_compiled_mesh_gives_the_numbers_of_one_device(mesh, words, options):
    compare_with_one_device(mesh, words, **options)


def compare_with_one_device(mesh, words, **options):
    losses, grads = one_device(words)
    got_losses, got_grads = results(mesh=mesh, **overrides_of(words), **options)
    off = np.abs(got_losses / losses - 1)
    measured = {"loss": off[0], "gradient": worst_leaf(got_grads, grads), "after 20 steps": off[-1]}
    print(f"{words} on {mesh}: {measured}")
    for what, bound in (BF16 if "bfloat16" in words else F32).items():
        assert measured[what] <= bound, f"{words} on {mesh}: {what} is off by {measured[what]:.2e}, at most {bound}"


def missed(rows) -> set:
    """The pairs of features, and of a feature and a mesh, that no row has."""
    columns = (shared.MESHES, *FEATURES)
    every = {frozenset(pair) for a, b in itertools.combinations(columns, 2) for pair in itertools.product(a, b)}
    return every - {
        frozenset(pair) for mesh, words in rows for pair in itertools.combinations([mesh, *words.split()], 2)
    }


def test_every_pair_of_features_and_meshes_is_in_a_row():
    assert missed(MATRIX) == set()


@pytest.mark.slow
def test_at_the_optimization_level_that_users_run_with():
    """The other tests ask LLVM for none, which halves the time to compile; this row is compiled as a run is."""
    options = {"xla_backend_optimization_level": 3}
    if "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:  # tests/conftest.py turns them off
        options["xla_cpu_use_fusion_emitters"] = True
    compare_with_one_device(*PAIRWISE[3], compiler_options=options)


def test_compiled_device_gives_the_numbers_of_the_plain_model():
    settings, batch = shared.tiny(mesh="1x1", **overrides_of(DEFAULTS)), shared.batch(0)
    losses, grads = one_device(DEFAULTS)
    params = shared.on_host(shared.initial_state(mesh="1x1", **overrides_of(DEFAULTS)).params)

    def objective(params):
        return reference.loss(settings, params, batch["tokens"], batch["targets"])[::-1]

    (_, loss), expected = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    assert abs(losses[0] / float(loss) - 1) < 1e-6
    assert worst_leaf(grads, shared.on_host(expected)) < 1e-5


def test_dropout_changes_the_loss():
    config = shared.tiny(mesh="4x2", **overrides_of("dropout"))
    with_dropout, without = (meshes.compute_gradients(c).loss for c in (config, config.replace(dropout=0.0)))
    assert abs(with_dropout / without - 1) > 1e-4
