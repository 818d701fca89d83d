"""The optimizers, the values of `optimizer=`; `FILE.py:NAME` adds one of the user's (own_optimizer.py).

An optimizer is a function that returns an optax transformation of clipped gradients to updates. Its parameters name
what it needs of `chain.list_inputs`.
"""

from collections.abc import Callable

import optax
from optax.transforms import chain  # while shardformer.legacy is installed, optax.chain is replaced

from shardformer.config.optimizer_keys import OptimizerKeys
from shardformer.config.registries import Registry

OPTIMIZERS = Registry("optim/optimizers.py")


@OPTIMIZERS.register
def adamw(
    keys: OptimizerKeys, decay_mask: Callable, scale_by_rate: optax.GradientTransformation, scale_to_size: Callable
):
    return _add_decay(scale_to_size(_scale_by_adam(keys), power=1), keys, decay_mask, scale_by_rate)


@OPTIMIZERS.register
def muon(keys: OptimizerKeys, decay_mask: Callable, scale_by_rate, scale_to_size: Callable, map_matrices: Callable):
    from shardformer.optim.muon import scale_by_muon  # not imported for other optimizers

    scaled = scale_by_muon(keys, _scale_by_adam(keys), map_matrices)
    # Orthogonal updates grow with the square root of the width, as their numbers keep their size.
    return _add_decay(scale_to_size(scaled, power=0.5), keys, decay_mask, scale_by_rate)


@OPTIMIZERS.register
def normuon(keys: OptimizerKeys, decay_mask: Callable, scale_by_rate, scale_to_size: Callable, map_matrices: Callable):
    return muon(keys, decay_mask, scale_by_rate, scale_to_size, map_matrices)  # scale_by_muon reads the name


@OPTIMIZERS.register
def lbfgs():
    from shardformer.optim.lbfgs import direction  # not imported for other optimizers

    return direction()  # chain.py adds the line search, outside of all masks


def _scale_by_adam(keys: OptimizerKeys):
    return optax.scale_by_adam(keys.beta1, keys.beta2)


def _add_decay(scaled, keys: OptimizerKeys, decay_mask: Callable, scale_by_rate):
    """Adds decoupled decay to a scaled gradient, and multiplies the sum by the rate."""
    decay = optax.add_decayed_weights(keys.weight_decay, mask=decay_mask)
    return chain(optax.identity(), scaled, decay, scale_by_rate)  # a stored state has four parts
