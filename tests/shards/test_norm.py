"""The norms against NumPy in float64, over the full width."""

import haiku as hk
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.shards.norm import Norm
from tests import asserts, sharded, shared

X = sharded.normal(0, 2, 3, 8) * np.float32(3) + np.float32(1)
SCALE, OFFSET = sharded.normal(1, 8), sharded.normal(2, 8)


def make_norm(**overrides):
    """Returns the function (parameters, x [B, T, D]) that applies a norm, and its parameters."""
    config = shared.tiny(**overrides)
    leaves = {"scale": SCALE} | ({} if config.model.bias == "none" else {"offset": OFFSET})
    return hk.without_apply_rng(hk.transform(lambda x: Norm(config)(x))).apply, {"norm": leaves}


def apply(x, **overrides):
    norm, parameters = make_norm(**overrides)
    return exact.run(norm, parameters, x).outputs


def expected(x, norm):
    x = np.asarray(x, np.float64)
    if norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(1e-5)) * SCALE


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_equals_its_closed_form(norm):
    np.testing.assert_allclose(apply(X, norm=norm, bias="none"), expected(X, norm), rtol=1e-12)
    np.testing.assert_allclose(apply(X, norm=norm, bias="ff"), expected(X, norm) + OFFSET, rtol=1e-12)
    assert asserts.relative(expected(X, "rmsnorm"), expected(X, "layernorm")) > 0.1


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_plus_one_multiplies_by_one_plus_scale(norm):
    got = apply(X, norm=f"{norm}_plus_one", bias="none")
    np.testing.assert_allclose(got, expected(X, norm) / SCALE * (1 + np.float64(SCALE)), rtol=1e-12)
    initial = hk.transform(lambda x: Norm(shared.tiny(norm=f"{norm}_plus_one", bias="none"))(x)).init(None, X)
    assert not initial["norm"]["scale"].any()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_of_bfloat16_computes_in_float32(norm):
    x = jnp.asarray(X + np.float32(100), jnp.bfloat16)  # far from zero, where the variance in bfloat16 would be noise
    apply_norm, parameters = make_norm(norm=norm)
    got = apply_norm(parameters, x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, apply_norm(parameters, x.astype(jnp.float32)).astype(jnp.bfloat16))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_compiled_norm_is_the_exact_one(norm):
    asserts.assert_compiled_is_exact(*make_norm(norm=norm), X)


def test_statistics_of_a_slice_differ():
    slices = [x - x.mean(-1, keepdims=True) for x in np.split(X, 2, axis=-1)]
    local = np.concatenate([x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) for x in slices], -1) * SCALE
    assert asserts.relative(local, apply(X, norm="layernorm", bias="none")) > 0.1
