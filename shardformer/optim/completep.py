"""`scale=completep`: gradients and updates as large as in the model for which the rate was tuned."""

import optax
from jax import tree_util
from optax.transforms import chain  # see chain.py

from shardformer.config.names import ALL_MATRICES, is_stacked
from shardformer.config.parsing import SizeRatio


def scale_to_size(scaled: optax.GradientTransformation, ratio: SizeRatio, power: float) -> optax.GradientTransformation:
    """Wraps a transformation whose updates have the same size for gradients of any size, above an epsilon.

    A decay of the weights that is added afterwards stays as it is: per step, it is the same for all widths.

    Arguments:
      power: of the width, by which the updates of the layers' matrices shrink: 1 for updates whose numbers all have the
        same size and one direction, of which a product adds up as many as the matrix is wide.
    """

    def gradient_factor(module: str, name: str) -> float:
        return ratio.width * (ratio.depth if is_stacked(module) else 1.0)

    def update_factor(module: str, name: str) -> float:
        return ratio.width**-power if is_stacked(module) and name in ALL_MATRICES else 1.0

    return chain(_multiply(gradient_factor), scaled, _multiply(update_factor))


def _multiply(factor) -> optax.GradientTransformation:
    def multiply(path, update):
        return update * factor(path[0].key, path[1].key)

    return optax.stateless(lambda updates, _: tree_util.tree_map_with_path(multiply, updates))
