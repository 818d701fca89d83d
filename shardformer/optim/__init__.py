"""optax from a Config. Everything here is global view: a norm is the norm of whole arrays."""

from shardformer.optim.chain import make, specs
from shardformer.optim.schedule import learning_rate

__all__ = ["learning_rate", "make", "specs"]
