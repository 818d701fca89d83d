"""Parameters and gradients of pipeline stages over `pp`; kernels/pipeline_schedule.py runs the stages.

The rows of a batch are split over pp as well as over dp: each stage embeds its own rows and computes their loss.
Parameters outside the layers are replicated over pp, and their gradient is the mean of the stages' gradients.
"""

import jax
from jax import lax

from shardformer.config.names import PP
from shardformer.shards.parameters import is_stacked


def make_local(params: dict) -> dict:
    """Returns parameters whose gradients stay on each stage until `mean` averages them."""

    def vary(p):
        return lax.pcast(p, PP, to="varying")

    return {m: leaves if is_stacked(m) else jax.tree.map(vary, leaves) for m, leaves in params.items()}


def mean(grads: dict) -> dict:
    """Averages over the rows of all stages; a stage's own layers have seen all rows, so their gradient is a sum."""

    def mean_of_own(g):
        return g / lax.axis_size(PP)

    def mean_of_shared(g):
        return lax.pmean(g, PP)

    return {m: jax.tree.map(mean_of_own if is_stacked(m) else mean_of_shared, grads[m]) for m in grads}
