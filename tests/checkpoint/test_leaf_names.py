"""Leaves have the names of their paths, one each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from shardformer.checkpoint import manifest


class State(NamedTuple):
    params: dict
    optimizer: tuple
    step: jax.Array


@pytest.fixture
def state():
    params = {"transformer/layers": {"q": jnp.ones((2, 3))}, "head": {"w": jnp.ones(3)}}
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(params, transform.init(params), jnp.int32(7))


def test_names_are_paths(state):
    assert list(manifest.flatten(state)) == [
        "params/head/w",
        "params/transformer/layers/q",
        "optimizer/1/0/count",
        "optimizer/1/0/mu/head/w",
        "optimizer/1/0/mu/transformer/layers/q",
        "optimizer/1/0/nu/head/w",
        "optimizer/1/0/nu/transformer/layers/q",
        "step",
    ]


def test_unflatten_needs_no_order(state):
    named = manifest.flatten(state)
    rebuilt = manifest.unflatten(state, dict(reversed(named.items())))
    assert jax.tree.structure(rebuilt) == jax.tree.structure(state)
    assert all(a is b for a, b in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(state), strict=True))


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two leaves are named 'a/b'"):
        manifest.flatten({"a": {"b": 1}, "a/b": 2})


def test_unflatten_names_the_difference(state):
    named = manifest.flatten(state)
    del named["step"]
    with pytest.raises(ValueError, match=r"only one side has \['step'\]"):
        manifest.unflatten(state, named)
