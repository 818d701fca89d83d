"""The optimizer of a Config, by optax. Global view: a norm is the norm of global arrays."""

from shardformer.optim import average, rules
from shardformer.optim.accumulate import accumulate_over_calls, mean_gradient, reset_accumulation
from shardformer.optim.chain import make_optimizer, state_specs
from shardformer.optim.lbfgs import step_size
from shardformer.optim.moments import round_moments, widen_moments
from shardformer.optim.schedule import learning_rate

__all__ = [
    "accumulate_over_calls",
    "average",
    "learning_rate",
    "make_optimizer",
    "mean_gradient",
    "reset_accumulation",
    "round_moments",
    "rules",
    "state_specs",
    "step_size",
    "widen_moments",
]
