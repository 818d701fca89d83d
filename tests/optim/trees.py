"""A small parameter tree of every kind of name, split over any mesh, and optimizers run on it."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from shardformer import optim
from shardformer.layout import mesh, specs
from shardformer.model import Model
from tests import asserts, shared

SHAPES = {
    "transformer/embed": {"tokens": (16, 8)},
    "transformer/layers": {"q": (2, 8, 8), "up": (2, 8, 16), "up_bias": (2, 16), "down": (2, 16, 8)},
    "transformer/layers/norm": {"scale": (2, 8)},
    "transformer/head": {"w": (8, 16), "bias": (16,)},
}
STEPS = 5


def config(**changes):
    """Settings whose rate and decay have an effect in five steps."""
    return shared.tiny(**{"lr": 1e-2, "weight_decay": 0.5, "warmup": 2} | changes)


def tree(seed: int):
    names = [(module, name) for module, leaves in SHAPES.items() for name in leaves]
    keys = dict(zip(names, jax.random.split(jax.random.key(seed), len(names)), strict=True))
    return {
        module: {name: jax.random.normal(keys[module, name], shape) for name, shape in leaves.items()}
        for module, leaves in SHAPES.items()
    }


def shardings(settings):
    def at(spec):
        return NamedSharding(mesh.make(settings), spec)

    return jax.tree.map(at, specs.parameter_specs(tree(0), settings))


def ours(settings, objective=None):
    """The parameters after five steps on split arrays, the state as `optim.state_specs` says, and that state."""
    optimizer = optim.make_optimizer(settings, Model.on(settings, mesh.make(settings)).map_matrices)
    layout = shardings(settings)
    of_state = optim.state_specs(optimizer, tree(0), specs.parameter_specs(tree(0), settings))
    state_layout = jax.tree.map(lambda spec: NamedSharding(mesh.make(settings), spec), of_state)
    params = jax.device_put(tree(0), layout)
    state = jax.jit(optimizer.init, out_shardings=state_layout)(params)

    def update(params, state, grads, step):
        extra = {"value": objective(params), "value_fn": objective} if objective else {}
        grads = jax.grad(objective)(params) if objective else grads
        updates, state = optimizer.update(grads, state, params, step=step, grad=grads, **extra)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, out_shardings=(layout, state_layout), donate_argnums=(0, 1))
    for step in range(STEPS):
        params, state = update(params, state, jax.device_put(tree(step + 1), layout), jnp.int32(step))
    return params, state


def plain(optimizer):
    """The parameters after the same five steps of plain optax on whole arrays."""
    params, state = tree(0), optimizer.init(tree(0))
    with jax.numpy_dtype_promotion("standard"):
        for step in range(STEPS):
            updates, state = jax.jit(optimizer.update)(tree(step + 1), state, params)
            params = optax.apply_updates(params, updates)
    return params


def errors(got, expected) -> dict[str, float]:
    """Returns the relative error of each parameter, by its full name."""
    return {
        f"{module}/{name}": asserts.relative(got[module][name], leaf)
        for module, leaves in expected.items()
        for name, leaf in leaves.items()
    }
