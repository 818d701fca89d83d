"""optax from a Config. Everything here is global view: a norm is the norm of whole arrays."""

from shardformer.optim import average, rules
from shardformer.optim.accumulate import begun_anew, in_several_calls, mean_gradient
from shardformer.optim.chain import make, specs
from shardformer.optim.lbfgs import step_size
from shardformer.optim.schedule import learning_rate

__all__ = [
    "average",
    "begun_anew",
    "in_several_calls",
    "learning_rate",
    "make",
    "mean_gradient",
    "rules",
    "specs",
    "step_size",
]
