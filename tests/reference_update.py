"""Plain optimizers on unsharded arrays by name, in NumPy and float64; they share nothing with the package.

Parameters are {full name: array}. Gradients are those of the dense reference. L-BFGS is that of optax, whose line
search is long.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardformer import exact
from shardformer.analysis import dense_reference as reference

MATRICES = ("q", "k", "v", "o", "up", "down")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The meaning of a configuration's keys, stated independently by the test."""

    factor: Callable[[str], float] = lambda name: 1.0  # of a parameter's rate; 0: frozen
    optimizer: str = "adamw"
    ema: float = 0.0
    lora: bool = False

    def learns(self, name: str) -> bool:
        return bool(self.factor(name)) and (not self.lora or _is_lora(name))


def flatten(tree) -> dict[str, np.ndarray]:
    return {f"{module}/{name}": np.asarray(leaf) for module, leaves in tree.items() for name, leaf in leaves.items()}


def train(config, recipe: Recipe, parameters: dict, batches) -> tuple[dict, dict]:
    """Returns the parameters after one step with each batch, and the average of the trainable ones."""
    learned = {name: leaf for name, leaf in parameters.items() if recipe.learns(name)}
    steps = _lbfgs_steps if recipe.optimizer == "lbfgs" else _steps
    history = list(steps(config, recipe, parameters, learned, batches))
    weights = np.array([recipe.ema ** (len(history) - 1 - i) for i in range(len(history))])
    average = {}
    if recipe.ema:
        average = {name: np.tensordot(weights / weights.sum(), [each[name] for each in history], 1) for name in learned}
    return parameters | history[-1], average


def objective(config, learned, others, batch):
    """Returns the loss of the dense model, with its adapters multiplied out."""
    every = others | learned
    nested = {}
    for name, leaf in every.items():
        module, _, leaf_name = name.rpartition("/")
        if not _is_lora(name):
            if f"{name}_lora_in" in every:
                update = jnp.einsum("lir,lro->lio", every[f"{name}_lora_in"], every[f"{name}_lora_out"])
                leaf = leaf + config.lora.lora_alpha / config.lora.lora_rank * update
            nested.setdefault(module, {})[leaf_name] = leaf
    return reference.loss(config, nested, batch["tokens"], batch["targets"])[1]


def _steps(config, recipe, parameters, learned, batches):
    gradient = jax.grad(functools.partial(objective, config))
    moments = {name: (np.zeros(leaf.shape), np.zeros(leaf.shape)) for name, leaf in learned.items()}
    for step, batch in enumerate(batches):
        candidates = {name: leaf for name, leaf in (parameters | learned).items() if not recipe.lora or _is_lora(name)}
        grads = exact.run(gradient, candidates, parameters, batch).outputs
        grads = {name: grads[name] for name in learned}
        norm = math.sqrt(sum(np.square(g).sum() for g in grads.values()))
        rate, moved = _rate(config, step), {}
        for name, p in learned.items():
            kind, g = name.split("/")[-1], grads[name] * min(1.0, config.optimizer.clip / norm)
            direction = _muon if recipe.optimizer == "muon" and kind in MATRICES else _adam
            update, *moments[name] = direction(config, g, *moments[name], step + 1)
            if kind in (*MATRICES, "tokens", "w") or _is_lora(kind):
                update = update + config.optimizer.weight_decay * p
            moved[name] = p - rate * recipe.factor(name) * update
        learned = moved
        yield learned


def _is_lora(name: str) -> bool:
    return "_lora_" in name


def _rate(config, step):
    if step < config.optimizer.warmup:
        return config.optimizer.lr * (step + 1) / config.optimizer.warmup
    way = (step - config.optimizer.warmup) / (config.training.steps - config.optimizer.warmup)
    return config.optimizer.lr_min + (config.optimizer.lr - config.optimizer.lr_min) * (1 + math.cos(math.pi * way)) / 2


def _adam(config, g, m, v, count):
    m = config.optimizer.beta1 * m + (1 - config.optimizer.beta1) * g
    v = config.optimizer.beta2 * v + (1 - config.optimizer.beta2) * g * g
    return m / (1 - config.optimizer.beta1**count) / (np.sqrt(v / (1 - config.optimizer.beta2**count)) + 1e-8), m, v


def _muon(config, g, m, unused, count):
    """Keller Jordan's, with Nesterov's momentum as optax corrects it, as large as an update of adam's."""
    m = 0.95 * m + 0.05 * g
    ahead = 0.95 * m / (1 - 0.95 ** (count + 1)) + 0.05 * g / (1 - 0.95**count)
    return np.stack([_orthogonal(matrix) for matrix in ahead]) * 0.2 * math.sqrt(max(g.shape[1:])), m, unused


def _orthogonal(x):
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def _lbfgs_steps(config, recipe, parameters, learned, batches):
    search = optax.scale_by_zoom_linesearch(20, initial_guess_strategy="one")
    optimizer = optax.lbfgs(memory_size=10, linesearch=search)

    def step(learned, state, parameters, batch):
        def value_fn(learned):
            return objective(config, learned, parameters, batch)

        value, grad = jax.value_and_grad(value_fn)(learned)
        state = (*state[:-1], search.init(learned))  # a new batch has another loss: the last search is void
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grad, state, learned, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(learned, updates), state

    state = optimizer.init(learned)
    for batch in batches:
        learned, state = exact.run(step, learned, state, parameters, batch).outputs
        yield learned
