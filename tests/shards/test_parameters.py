"""Parameters are drawn without the forward pass that shows which there are."""

import jax

from shardformer.layout import resolve
from shardformer.shards import CausalTransformerShard
from tests import shared


def operations(function, *arguments) -> set[str]:
    return {equation.primitive.name for equation in jax.make_jaxpr(function)(*arguments).eqns}


def test_draws_have_no_product_of_the_forward_pass():
    shard = CausalTransformerShard(resolve(shared.tiny(mesh="1x1", layers=1).architecture))
    found = operations(shard.init, jax.random.key(0))
    assert found
    assert "dot_general" not in found
