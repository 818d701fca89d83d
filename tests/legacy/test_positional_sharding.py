"""`jax.sharding.PositionalSharding` against the placements of jax 0.4.13."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from shardformer import legacy
from shardformer.legacy.positional_sharding import PositionalSharding

from .record_positional import LAYOUTS, placements

RECORDED = json.loads((Path(__file__).parent / "goldens" / "positional_sharding.json").read_text())


@pytest.fixture(scope="module")
def found():
    return placements(PositionalSharding(jax.devices()[:8]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_lie_where_jax_0_4_13_put_them(found, layout):
    assert found[layout] == RECORDED[layout]


def test_another_layout_is_noticed():
    assert RECORDED["base.reshape(4, 2)"] != RECORDED["base.reshape((2, 4))"]
    assert RECORDED["base.reshape(4, 2).replicate(0)"] != RECORDED["base.reshape(4, 2)"]


def test_a_jit_takes_several_layouts_of_its_devices():
    layout = PositionalSharding(jax.devices()[:8]).reshape(4, 2)
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), layout)
    double = jax.jit(lambda v: jax.lax.with_sharding_constraint(v, layout.replicate(0)) * 2)
    y = double(x)
    assert (y == 2 * jnp.arange(64.0).reshape(8, 8)).all()
    assert {shard.data.shape for shard in y.addressable_shards} == {(8, 4)}


def test_install_puts_the_name_back():
    with legacy.installed():
        from jax.sharding import PositionalSharding as old

        assert old is PositionalSharding
    assert not hasattr(jax.sharding, "PositionalSharding")
