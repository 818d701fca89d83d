"""What a layer keeps for its backward pass, by the names that it gives to its activations; the rest is computed again.

Without a wish everything is kept. Parameters that ZeRO gathers have no name: kept, they would be the whole model on
every device; those that a pipeline stage takes for a round would be kept once for each microbatch. (Where layers are
unrolled, XLA's CPU keeps them all the same: it drops the barriers of `jax.checkpoint`.)
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from shardformer.config import Config
from shardformer.kernels.blockwise_attention import ATTENDED

PRODUCT, ATTENTION_WEIGHTS, SUM = "product", "attention weights", "sum over mp"


def name_product(x):
    """Of activations and a matrix."""
    return checkpoint_name(x, PRODUCT)


def name_weights(x):
    """With which attention adds up values: as many as there are pairs of tokens."""
    return checkpoint_name(x, ATTENTION_WEIGHTS)


def name_attended(x):
    """The values that attention has added up."""
    return checkpoint_name(x, ATTENDED)


def name_sum(x):
    """What an all-reduce has given."""
    return checkpoint_name(x, SUM)


def recompute_layer(layer: Callable, config: Config) -> Callable:
    """The layer, its backward pass computing again what is not kept."""
    if config.remat == "full":
        return jax.checkpoint(layer)
    if config.remat == "dots" or config.zero == 3 or config.pp > 1:
        weights = (ATTENTION_WEIGHTS,) if config.remat == "none" else ()
        return jax.checkpoint(layer, policy=_keep(PRODUCT, ATTENDED, SUM, *weights))
    return layer


def recompute_attention(attend: Callable, config: Config) -> Callable:
    """Attention, its backward pass computing again all that lies between its arguments and its values."""
    return jax.checkpoint(attend, policy=_keep(ATTENDED)) if config.remat == "attention" else attend


def _keep(*names: str):
    return jax.checkpoint_policies.save_only_these_names(*names)
