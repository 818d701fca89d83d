"""`flax.nn`: its activations, which live on in jax.nn."""

from jax.nn import (  # noqa: F401  # the names of the old module
    celu,
    elu,
    gelu,
    glu,
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
    tanh,
)


def __getattr__(name: str):
    raise AttributeError(f"flax.nn.{name} was removed, and shardformer.legacy does not put it back; write flax.linen")
