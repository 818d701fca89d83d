"""Optimizers as a user would write them, for `optimizer=FILE.py:NAME`."""

import sys

import optax


def lion(rate, keys):
    return optax.lion(rate, keys.beta1, keys.beta2, weight_decay=keys.weight_decay)


def momentum(rate):
    return optax.sgd(rate, momentum=0.9, nesterov=True)


def schedule_free(keys):
    return optax.contrib.schedule_free_adamw(keys.lr, warmup_steps=keys.warmup, b1=0.9)


def adafactor(rate):
    """Factors matrices of at least 8 x 8, as the tiny models of tests have no larger ones."""
    return optax.adafactor(rate, min_dim_size_to_factor=8)


def adamw(keys, rate, decay_mask):
    return optax.adamw(rate, keys.beta1, keys.beta2, weight_decay=keys.weight_decay, mask=decay_mask)


def nothing():
    return lambda grads: grads


def of_loss(rate, loss):
    return optax.sgd(rate)


def line_search():
    return optax.lbfgs()


def fails(keys):
    return optax.sgd(keys.learning_rate)


def halves():
    """Its updates are not like the parameters."""
    return optax.stateless(lambda updates, _: {module: {} for module in updates})


def grows():
    """Its state has another dtype after an update."""

    def update(updates, state, params=None):
        return updates, state.astype("float32")

    return optax.GradientTransformation(lambda _: optax.tree.zeros_like(0) + 1, update)


number = 3


def exits():
    sys.exit(3)
