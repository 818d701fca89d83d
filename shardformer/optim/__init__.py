"""The optimizer of a Config, by optax. Global view: a norm is the norm of global arrays."""

from shardformer.optim.chain import make_optimizer, state_specs
from shardformer.optim.schedule import learning_rate

__all__ = ["learning_rate", "make_optimizer", "state_specs"]
