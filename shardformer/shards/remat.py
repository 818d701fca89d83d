"""The activations that a layer keeps for its backward pass, by their names; the others are recomputed.

remat=none keeps all activations, but neither parameters that ZeRO gathers nor parameters that a pipeline stage takes
for a round. Gathered parameters would be the full model on every device; a stage's would be kept once for each
microbatch. Neither has a name. (With unrolled layers, XLA keeps both on a CPU nevertheless: it drops the barriers of
`jax.checkpoint`.)
"""

from collections.abc import Callable

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardformer.config import Config
from shardformer.kernels.blockwise_attention import ATTENDED
from shardformer.kernels.softmax import ATTENTION_WEIGHTS

PRODUCT, SUM = "product", "sum over mp"


def name_product(x: Array) -> Array:
    """Names the product of activations and a matrix."""
    return checkpoint_name(x, PRODUCT)


def name_weights(x: Array) -> Array:
    """Names the softmax of the attention logits: one number for each pair of tokens."""
    return checkpoint_name(x, ATTENTION_WEIGHTS)


def name_attended(x: Array) -> Array:
    """Names the result of attention: weighted sums of values."""
    return checkpoint_name(x, ATTENDED)


def name_sum(x: Array) -> Array:
    """Names the result of an all-reduce."""
    return checkpoint_name(x, SUM)


def recompute_layer(layer: Callable, config: Config, in_loop: bool) -> Callable:
    """Returns the layer with a backward pass that recomputes all activations that remat= does not keep.

    A layer in a loop needs no barriers against XLA's reuse of its forward pass, whose loop is another one. On a TPU
    they would copy each kept activation before it is read.
    """
    prevent_cse = not in_loop
    if config.remat == "full":
        return jax.checkpoint(layer, prevent_cse=prevent_cse)
    if config.remat == "dots" or config.zero == 3 or config.pp > 1:
        weights = (ATTENTION_WEIGHTS,) if config.remat == "none" else ()
        policy = _keep(PRODUCT, ATTENDED, SUM, *weights)
        return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)
    return layer


def recompute_attention(attend: Callable, config: Config) -> Callable:
    """Returns attention with a backward pass that recomputes everything between its arguments and its result."""
    return jax.checkpoint(attend, policy=_keep(ATTENDED)) if config.remat == "attention" else attend


def _keep(*names: str):
    return jax.checkpoint_policies.save_only_these_names(*names)
