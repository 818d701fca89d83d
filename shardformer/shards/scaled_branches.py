"""A factor on each residual branch, as Granite has it."""

from typing import Any

from jax import Array

from shardformer.shards.layer import LayerFeature, LayerInputs


class ScaledBranches(LayerFeature):
    """The multiplication of each branch, with its biases, before it is added to the residual stream."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Any) -> LayerInputs:
        """Returns the inputs with the factor after each branch."""
        return inputs._replace(after_branch=(*inputs.after_branch, self._scale))

    def _scale(self, y_BTD: Array, site: int) -> Array:
        return y_BTD * self.config.model.residual_scale
