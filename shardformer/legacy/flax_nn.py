"""The functions of the old `flax.nn` (later `flax.deprecated.nn`) that still mean the same: its activations.

The modules of flax.nn, whose parameters were created by `Module.init`, have no counterpart that could take their place.
"""

from jax.nn import (  # noqa: F401  # the names of the old module
    celu,
    elu,
    gelu,
    glu,
    initializers,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    relu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    standardize,
    swish,
)
from jax.numpy import tanh  # noqa: F401
