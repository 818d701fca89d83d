"""What a layer keeps for its backward pass, by the names that it gives to its activations; the rest is computed again.

Without a wish everything is kept. Parameters that ZeRO gathers have no name: kept, they would be the whole model on
every device; those that a pipeline stage takes for a round would be kept once for each microbatch. (Where layers are
unrolled, XLA's CPU keeps them all the same: it drops the barriers of `jax.checkpoint`.)
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from shardformer.config import Config

PRODUCT, ATTENTION_WEIGHTS, SUM = "product", "attention weights", "sum over mp"


def name_product(x):
    """Of activations and a matrix."""
    return checkpoint_name(x, PRODUCT)


def name_weights(x):
    """With which attention adds up values: as many as there are pairs of tokens."""
    return checkpoint_name(x, ATTENTION_WEIGHTS)


def name_sum(x):
    """What an all-reduce has given."""
    return checkpoint_name(x, SUM)


def recompute(layer: Callable, config: Config) -> Callable:
    """The layer, its backward pass computing again what is not kept."""
    if config.remat:
        return jax.checkpoint(layer)
    if config.zero == 3 or config.pp > 1:
        kept = jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENTION_WEIGHTS, SUM)
        return jax.checkpoint(layer, policy=kept)
    return layer
