"""Matrices in bfloat16 beside float32 masters: the run that float32 parameters give, and small updates that add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.analysis import verify_exact
from shardformer.config.names import EXPERT_MATRICES, MATRICES, SHARED_MATRICES
from shardformer.errors import UsageError
from shardformer.model import master_weights
from tests import asserts, meshes, shared, tiers

STEPS = 3
BOTH = {"dtype": "bfloat16", "layers": 1}
ROUNDED = {"param_dtype": "bfloat16"}
CASES = [
    {"mesh": "4x2", "zero": 1, "ema": 0.5, "accum": 2},
    {"mesh": "2x4", "accum": 2, "accum_mode": "multisteps", "lr_rules": "k=frozen,*_bias=2x"},
    {"mesh": "8x1", "zero": 3},
    {"mesh": "2x2", "experts": 4, "shared_width": 8, "bias": "none", "balance_loss": 0.5, "d_ff": 16},
]
# A gradient that zero=3 has summed over dp is rounded once, as its parameter is; all else is exact.
COMPILED = [(CASES[0], 0.0), tiers.at_night((CASES[2], 2**-7))]
HALVES = {*MATRICES, *EXPERT_MATRICES, *SHARED_MATRICES}


@functools.cache
def initial(**overrides):
    return shared.on_host(shared.trainer(**overrides | {"mesh": "1x1"}).init())


def run(forget=False, steps=STEPS, **overrides):
    """The state after some steps, by programs that keep every rounding that was written: XLA's own may leave out some.

    forget: masters fall back to what is stored, as if there were none.
    """
    t, exactly = shared.trainer(**overrides), {"xla_allow_excess_precision": False}
    state = jax.device_put(initial(**overrides), t.shardings)
    scan = t.config.training.accum == 1 or t.config.training.accum_mode == "scan"
    step = t.lower(state, shared.batch())[0].compile(exactly)
    for i in range(steps):
        batch = t.to_devices(shared.batch(i))
        if scan:
            state, _ = step(state, batch, np.int32(i))
        else:
            metrics = t.accumulation.zero_metrics()
            for part in range(t.config.training.accum):
                state, metrics = step(state, batch, np.int32(i), np.int32(part), metrics)
        if forget:
            stored = master_weights.select_masters(state.params, t.config)
            state = state._replace(masters=jax.tree.map(lambda p: p.astype(jnp.float32), stored))
    return t, state


@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_masters_are_exactly_those_of_one_device(overrides):
    """Matrices are stored in half of the bytes, and their masters are split as their gradients are."""
    config = shared.tiny(**BOTH | ROUNDED | overrides)
    t = verify_exact.make_trainer(config)
    after = state, _ = meshes.run_steps(config, t)
    single = meshes.run_steps_on_one_device(meshes.simplify(config))
    meshes.assert_exact(verify_exact.compare_states(after, single))
    kept = state.masters["transformer/layers"]
    assert set(kept) == HALVES & set(state.params["transformer/layers"])
    for name, leaf in kept.items():  # nothing is rounded in float64
        np.testing.assert_array_equal(state.params["transformer/layers"][name], leaf)
    for name, leaf in t.abstract.params["transformer/layers"].items():
        assert leaf.dtype == ("bfloat16" if name in HALVES else "float32")
    split = jax.tree.map(lambda leaf: leaf.spec, t.shardings.masters)
    assert split == master_weights.select_masters(t.model.grad_specs, t.config)


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "allowed"), COMPILED, ids=str)
def test_the_masters_are_the_parameters_of_a_float32_run(overrides, allowed):
    _, expected = run(**BOTH | overrides)
    t, state = run(**BOTH | overrides | ROUNDED)
    assert (
        asserts.worst_relative(
            master_weights.trainable_parameters(state.params, state.masters, t.config), expected.params
        )
        <= allowed
    )
    assert asserts.worst_relative(state.average, expected.average) <= allowed
    kept = state.masters["transformer/layers"]
    for name in kept:
        np.testing.assert_array_equal(state.params["transformer/layers"][name], kept[name].astype("bfloat16"))
    split = jax.tree.map(lambda leaf: leaf.sharding.spec, state.masters)
    assert split == master_weights.select_masters(t.model.grad_specs, t.config)


@pytest.mark.slow
def test_updates_below_the_last_digit_vanish_without_masters():
    tiny = BOTH | ROUNDED | {"mesh": "1x1", "lr": 1e-6, "lr_min": 1e-6, "warmup": 0, "weight_decay": 0.0}
    start = initial(**tiny).params["transformer/layers"]["q"].astype(np.float32)
    moved = [
        np.abs(np.asarray(run(forget, steps=30, **tiny)[1].params["transformer/layers"]["q"], np.float32) - start)
        for forget in (False, True)
    ]
    assert (moved[1] > 0).mean() < 0.5 * (moved[0] > 0).mean()


def test_adapters_have_no_masters_beside_bfloat16_matrices():
    t = shared.trainer(mesh="4x2", zero=1, lora_rank=2, **BOTH | ROUNDED)
    state = t.abstract
    assert not jax.tree.leaves(state.masters)
    assert state.params["transformer/layers"]["q"].dtype == "bfloat16"
    assert state.params["transformer/layers"]["q_lora_in"].dtype == "float32"


@pytest.mark.slow
def test_a_restored_state_goes_on_bitwise(tmp_path):
    options = BOTH | ROUNDED | {"moment_dtype": "bfloat16", "mesh": "4x2", "zero": 1, "bias": "none", "norm": "rmsnorm"}
    t = shared.trainer(**options)
    state, _ = t.step(t.init(), shared.batch(0), 0)
    checkpoint.save(tmp_path, 1, state, {})
    restored = checkpoint.restore(checkpoint.step_folder(tmp_path, 1), t.abstract)
    ends = [shared.on_host(t.step(start, shared.batch(1), 1)[0]) for start in (restored, state)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(ends[0].optimizer)} == {"bfloat16", "int32"}


@pytest.mark.slow
def test_a_type_that_products_do_not_have_is_refused():
    with pytest.raises(UsageError, match=r"param_dtype=bfloat16 .* give dtype=bfloat16; got dtype=float32"):
        shared.tiny(param_dtype="bfloat16")
