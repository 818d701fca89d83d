"""Parameters and gradients where the layers are stages over `pp`; kernels/pipeline_schedule.py runs the stages.

The rows of a batch are split over pp as well as over dp: each stage embeds rows of its own and computes their loss.
Parameters outside the layers are whole on every stage, and their gradient is the mean of the stages' gradients.
"""

import jax
from jax import lax

from shardformer.config.names import PP
from shardformer.shards.parameters import is_stacked


def make_local(params):
    """Parameters whose gradients stay on each stage until `mean` averages them."""
    vary = lambda p: lax.pcast(p, PP, to="varying")
    return {m: leaves if is_stacked(m) else jax.tree.map(vary, leaves) for m, leaves in params.items()}


def mean(grads):
    """The means over the rows of all stages; a stage's own layers have seen all rows, so their gradient is a sum."""
    own = lambda g: g / lax.axis_size(PP)
    shared = lambda g: lax.pmean(g, PP)
    return {m: jax.tree.map(own if is_stacked(m) else shared, leaves) for m, leaves in grads.items()}
