"""Which activations a layer keeps for its backward pass, by their names; the others are recomputed.

remat=none keeps everything, but not what ZeRO gathers, which would be the whole model on every device, nor what a
pipeline stage takes for a round, which would be kept once for each microbatch: neither has a name. (Where layers are
unrolled, XLA keeps both on a CPU nevertheless: it drops the barriers of `jax.checkpoint`.)
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from shardformer.config import Config
from shardformer.kernels.blockwise_attention import ATTENDED

PRODUCT, ATTENTION_WEIGHTS, SUM = "product", "attention weights", "sum over mp"


def name_product(x):
    """The product of activations and a matrix."""
    return checkpoint_name(x, PRODUCT)


def name_weights(x):
    """The softmax of the attention logits: one number for each pair of tokens."""
    return checkpoint_name(x, ATTENTION_WEIGHTS)


def name_attended(x):
    """The result of attention: weighted sums of values."""
    return checkpoint_name(x, ATTENDED)


def name_sum(x):
    """The result of an all-reduce."""
    return checkpoint_name(x, SUM)


def recompute_layer(layer: Callable, config: Config) -> Callable:
    """The layer, whose backward pass recomputes what is not kept."""
    if config.remat == "full":
        return jax.checkpoint(layer)
    if config.remat == "dots" or config.zero == 3 or config.pp > 1:
        weights = (ATTENTION_WEIGHTS,) if config.remat == "none" else ()
        return jax.checkpoint(layer, policy=_keep(PRODUCT, ATTENDED, SUM, *weights))
    return layer


def recompute_attention(attend: Callable, config: Config) -> Callable:
    """Attention, whose backward pass recomputes everything between its arguments and its result."""
    return jax.checkpoint(attend, policy=_keep(ATTENDED)) if config.remat == "attention" else attend


def _keep(*names: str):
    return jax.checkpoint_policies.save_only_these_names(*names)
