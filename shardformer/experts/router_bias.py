"""The update of the routers' biases, which balance the load of experts without a loss, as DeepSeek-V3 does.

The gradient of a bias is the mean over rows of each expert's excess of pairs, E * count - tokens * choices; see
`expert_layer.py`. The bias falls by `balance_rate` for an expert with more pairs than the mean, and rises for one
with fewer. Neither the learning rate nor the limit of the gradient's norm applies.
"""

import jax
import jax.numpy as jnp
import optax
from jax import tree_util

from shardformer.config import Config
from shardformer.config.names import ROUTER_BIAS


def add_bias_update(
    optimizer: optax.GradientTransformationExtraArgs, config: Config
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of all other parameters, with this update of the biases."""
    rows = config.model_rows  # the gradient is an integer divided by their number

    def update(updates, state, params=None, **_):
        return jax.tree.map(lambda g: -config.experts.balance_rate * jnp.sign(jnp.round(g * rows)), updates), state

    bias = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    return optax.partition({"bias": bias, "other": optimizer}, label_biases)


def label_biases(tree):
    """Labels each leaf "bias" or "other"."""
    return tree_util.tree_map_with_path(lambda path, _: "bias" if path[-1].key == ROUTER_BIAS else "other", tree)


def zero_biases(tree):
    """Returns a tree like the gradient with zeros for the biases."""
    return jax.tree.map(lambda leaf, label: jnp.zeros_like(leaf) if label == "bias" else leaf, tree, label_biases(tree))
