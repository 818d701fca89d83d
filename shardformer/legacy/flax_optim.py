"""`flax.optim`, which flax 0.6 removed: optimizers that hold the parameters that they train. Needs jax only.

The fields have flax's names, because programs and checkpoints use them.
"""

import contextlib
import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class _Record:
    """A dataclass that changes by copies, as those of `flax.struct` do."""

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def _pytree(*static: str):
    """Returns a decorator that makes a dataclass a pytree; the `static` fields are none of its leaves."""

    def register(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return jax.tree_util.register_dataclass(cls, [name for name in names if name not in static], list(static))

    return register


@_pytree()
@dataclasses.dataclass(frozen=True)
class OptimizerState(_Record):
    step: Any
    param_states: Any


class OptimizerDef:
    """An optimization algorithm, which a subclass defines for one parameter."""

    def __init__(self, hyper_params):
        self.hyper_params = hyper_params

    def init_param_state(self, param):
        raise NotImplementedError

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        """Returns the new parameter and its new state."""
        raise NotImplementedError

    def init_state(self, params) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(self.init_param_state, params))

    def apply_gradient(self, hyper_params, params, state: OptimizerState, grads):
        tree: Any = jax.tree.structure(params)  # jax's stubs leave its methods out
        leaves = tree.flatten_up_to(params)
        states, gradients = tree.flatten_up_to(state.param_states), tree.flatten_up_to(grads)
        updated = [
            self.apply_param_gradient(state.step, hyper_params, *each)
            for each in zip(leaves, states, gradients, strict=True)
        ]
        new_params = tree.unflatten([param for param, _ in updated])
        return new_params, OptimizerState(state.step + 1, tree.unflatten([new for _, new in updated]))

    def update_hyper_params(self, **overrides):
        hyper_params = overrides.pop("hyper_params", self.hyper_params)
        return hyper_params.replace(**overrides) if overrides else hyper_params

    def create(self, target, focus=None) -> "Optimizer":
        definition = self if focus is None else MultiOptimizer((focus, self))
        return Optimizer(definition, definition.init_state(target), target)


class MultiOptimizer(OptimizerDef):
    """An optimizer for each part of the parameters, given as pairs of a flax Traversal and an optimizer.

    Parameters of no part stay as they are, and have the state None.
    """

    def __init__(self, *parts):
        super().__init__([optimizer.hyper_params for _, optimizer in parts])
        self.parts = parts

    def _owners(self, params) -> dict[int, int]:
        """Returns the part of each parameter, both by number."""
        tree: Any = jax.tree.structure(params)
        numbers = tree.unflatten(range(tree.num_leaves))
        found = [(leaf, part) for part, (focus, _) in enumerate(self.parts) for leaf in focus.iterate(numbers)]
        if len(dict(found)) < len(found):
            raise ValueError(f"MultiOptimizer got parts that overlap, as (parameter, part): {sorted(found)}")
        return dict(found)

    def init_state(self, params) -> OptimizerState:
        tree: Any = jax.tree.structure(params)
        leaves = tree.flatten_up_to(params)
        states: list[Any] = [None] * len(leaves)
        for leaf, part in self._owners(params).items():
            states[leaf] = self.parts[part][1].init_param_state(leaves[leaf])
        return OptimizerState(jnp.zeros((), jnp.int32), tree.unflatten(states))

    def apply_gradient(self, hyper_params, params, state: OptimizerState, grads):
        tree: Any = jax.tree.structure(params)
        leaves = tree.flatten_up_to(params)
        states, gradients = tree.flatten_up_to(state.param_states), tree.flatten_up_to(grads)
        for leaf, part in self._owners(params).items():
            leaves[leaf], states[leaf] = self.parts[part][1].apply_param_gradient(
                state.step, hyper_params[part], leaves[leaf], states[leaf], gradients[leaf]
            )
        return tree.unflatten(leaves), OptimizerState(state.step + 1, tree.unflatten(states))

    def update_hyper_params(self, **overrides):
        hyper_params = overrides.pop("hyper_params", self.hyper_params)
        return [each.replace(**overrides) for each in hyper_params] if overrides else hyper_params


@_pytree("optimizer_def")
@dataclasses.dataclass(frozen=True)
class Optimizer(_Record):
    optimizer_def: OptimizerDef
    state: Any
    target: Any

    def apply_gradient(self, grads, **overrides) -> "Optimizer":
        hyper_params = self.optimizer_def.update_hyper_params(**overrides)
        target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads)
        return self.replace(target=target, state=state)

    def compute_gradient(self, loss_fn):
        """Returns the loss, what else `loss_fn` returns, and the gradient."""

        def loss_and_rest(target):
            result = loss_fn(target)
            return result if isinstance(result, tuple) else (result,)

        def loss_first(target):
            loss, *rest = loss_and_rest(target)
            return loss, rest

        (loss, rest), gradient = jax.value_and_grad(loss_first, has_aux=True)(self.target)
        return (loss, *rest, gradient)

    compute_gradients = compute_gradient

    def optimize(self, loss_fn, **overrides):
        *results, gradient = self.compute_gradient(loss_fn)
        return (self.apply_gradient(gradient, **overrides), *results)


@_pytree()
@dataclasses.dataclass(frozen=True)
class _Rate(_Record):
    learning_rate: Any


class GradientDescent(OptimizerDef):
    def __init__(self, learning_rate=None):
        super().__init__(_Rate(learning_rate))

    def init_param_state(self, param):
        return ()

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        return param - _rate(hyper_params) * grad, state


@_pytree()
@dataclasses.dataclass(frozen=True)
class _MomentumHyperParams(_Record):
    learning_rate: Any
    beta: Any
    weight_decay: Any
    nesterov: bool


@_pytree()
@dataclasses.dataclass(frozen=True)
class _MomentumParamState(_Record):
    momentum: Any


class Momentum(OptimizerDef):
    def __init__(self, learning_rate=None, beta=0.9, weight_decay=0, nesterov=False):
        super().__init__(_MomentumHyperParams(learning_rate, beta, weight_decay, nesterov))

    def init_param_state(self, param):
        return _MomentumParamState(jnp.zeros_like(param))

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        if not _is_zero(hyper_params.weight_decay):
            grad = grad + hyper_params.weight_decay * param
        momentum = hyper_params.beta * state.momentum + grad
        direction = grad + hyper_params.beta * momentum if hyper_params.nesterov else momentum
        return param - _rate(hyper_params) * direction, _MomentumParamState(momentum)


@_pytree()
@dataclasses.dataclass(frozen=True)
class _AdamHyperParams(_Record):
    learning_rate: Any
    beta1: Any
    beta2: Any
    eps: Any
    weight_decay: Any


@_pytree()
@dataclasses.dataclass(frozen=True)
class _AdamParamState(_Record):
    grad_ema: Any
    grad_sq_ema: Any

    def corrected(self, hyper_params, step, dtype):
        """Returns both means without the bias of their start at zero."""
        count = jnp.asarray(step + 1, dtype)
        return self.grad_ema / (1 - hyper_params.beta1**count), self.grad_sq_ema / (1 - hyper_params.beta2**count)


class Adam(OptimizerDef):
    """Adam, whose weight decay is multiplied by the learning rate."""

    def __init__(self, learning_rate=None, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
        super().__init__(_AdamHyperParams(learning_rate, beta1, beta2, eps, weight_decay))

    def init_param_state(self, param):
        return _AdamParamState(jnp.zeros_like(param), jnp.zeros_like(param))

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        new = _AdamParamState(
            hyper_params.beta1 * state.grad_ema + (1.0 - hyper_params.beta1) * grad,
            hyper_params.beta2 * state.grad_sq_ema + (1.0 - hyper_params.beta2) * jnp.square(grad),
        )
        mean, square = new.corrected(hyper_params, step, param.dtype)
        return self._updated(hyper_params, param, mean / (jnp.sqrt(square) + hyper_params.eps)), new

    def _updated(self, hyper_params, param, direction):
        rate = _rate(hyper_params)
        return param - rate * direction - rate * hyper_params.weight_decay * param


class LAMB(Adam):
    """Adam whose step has the length of the parameter, times the learning rate."""

    def __init__(self, learning_rate=None, beta1=0.9, beta2=0.999, weight_decay=0, eps=1e-6):
        super().__init__(learning_rate, beta1, beta2, eps, weight_decay)

    def _updated(self, hyper_params, param, direction):
        direction = direction + hyper_params.weight_decay * param
        length, step = jnp.linalg.norm(param), jnp.linalg.norm(direction)
        ratio = jnp.where(length + step > 0.0, length / step, 1.0)
        return param - ratio * _rate(hyper_params) * direction


@_pytree()
@dataclasses.dataclass(frozen=True)
class _AdafactorHyperParams(_Record):
    learning_rate: Any
    factored: bool
    multiply_by_parameter_scale: bool
    beta1: Any
    decay_rate: Any
    step_offset: Any
    clipping_threshold: Any
    weight_decay_rate: Any
    min_dim_size_to_factor: int
    epsilon1: Any
    epsilon2: Any


@_pytree()
@dataclasses.dataclass(frozen=True)
class _AdafactorParamState(_Record):
    """The moving averages of a parameter; those that it does not use have one element."""

    v_row: Any
    v_col: Any
    v: Any
    m: Any


class Adafactor(OptimizerDef):
    """Adafactor, which stores the means over rows and columns of the squared gradients of a large matrix."""

    def __init__(
        self, learning_rate=None, factored=True, multiply_by_parameter_scale=True, beta1=None, decay_rate=0.8,
        step_offset=0, clipping_threshold=1.0, weight_decay_rate=None, min_dim_size_to_factor=128, epsilon1=1e-30,
        epsilon2=1e-3, dtype_momentum=jnp.float32,
    ):  # fmt: skip
        self.dtype_momentum = jnp.dtype(dtype_momentum)
        hyper_params = _AdafactorHyperParams(
            learning_rate, factored, multiply_by_parameter_scale, beta1, decay_rate, step_offset,
            clipping_threshold, weight_decay_rate, min_dim_size_to_factor, epsilon1, epsilon2,
        )  # fmt: skip
        super().__init__(hyper_params)

    def _largest_axes(self, shape) -> tuple[int, int] | None:
        """Returns the second largest and the largest axis of a parameter whose average is factored; else None."""
        order = np.argsort(shape)
        if not self.hyper_params.factored or len(shape) < 2:
            return None
        if shape[order[-2]] < self.hyper_params.min_dim_size_to_factor:
            return None
        return int(order[-2]), int(order[-1])

    def init_param_state(self, param):
        axes = self._largest_axes(param.shape)
        unused = jnp.zeros(1)
        row, column = (jnp.zeros(np.delete(param.shape, axis)) for axis in reversed(axes)) if axes else (unused, unused)
        full = unused if axes else jnp.zeros(param.shape)
        has_momentum = self.hyper_params.beta1 is not None
        momentum = jnp.zeros(param.shape, self.dtype_momentum) if has_momentum else unused
        return _AdafactorParamState(row, column, full, momentum)

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        direction, new = self._scaled(step, hyper_params, state, jnp.asarray(grad, jnp.float32))
        if (threshold := hyper_params.clipping_threshold) is not None:
            direction = direction / jnp.maximum(1.0, _root_mean_square(direction) / threshold)
        rate = _rate(hyper_params)
        if self.hyper_params.multiply_by_parameter_scale:
            rate = rate * jnp.maximum(_root_mean_square(param), hyper_params.epsilon2)
        change = rate * direction
        if hyper_params.beta1 is not None:
            change = hyper_params.beta1 * state.m + (1.0 - hyper_params.beta1) * change
            new = new.replace(m=change.astype(self.dtype_momentum))
        decayed = param if hyper_params.weight_decay_rate is None else (1.0 - hyper_params.weight_decay_rate) * param
        return (decayed - change).astype(param.dtype), new

    def _scaled(self, step, hyper_params, state, grad):
        """Returns the gradient divided by the root of the averages of its square, and the new averages."""
        old = 1.0 - (jnp.asarray(step - hyper_params.step_offset, jnp.float32) + 1.0) ** -hyper_params.decay_rate
        square = grad * grad + hyper_params.epsilon1
        axes = self._largest_axes(grad.shape)
        if axes is None:
            full = old * state.v + (1.0 - old) * square
            return grad * full**-0.5, state.replace(v=full)
        second, largest = axes
        row = old * state.v_row + (1.0 - old) * jnp.mean(square, axis=largest)
        column = old * state.v_col + (1.0 - old) * jnp.mean(square, axis=second)
        mean = jnp.mean(row, axis=second - (second > largest), keepdims=True)
        row_factor = jnp.expand_dims((row / mean) ** -0.5, largest)
        return grad * row_factor * jnp.expand_dims(column**-0.5, second), state.replace(v_row=row, v_col=column)


def __getattr__(name: str):
    if name == "ModelParamTraversal":
        return importlib.import_module("flax.traverse_util").ModelParamTraversal
    raise AttributeError(f"flax.optim.{name} was removed, and shardformer.legacy does not put it back; write optax")


def _rate(hyper_params):
    if hyper_params.learning_rate is None:
        raise ValueError("flax.optim got no learning rate; pass learning_rate= to the optimizer or to apply_gradient")
    return hyper_params.learning_rate


def _root_mean_square(x):
    return jnp.sqrt(jnp.mean(x * x))


def _is_zero(value) -> bool:
    return isinstance(value, int | float) and value == 0


# What a checkpoint has of each type. An optimizer's definition is not among it.
STORED = {
    Optimizer: ("target", "state"),
    OptimizerState: ("step", "param_states"),
    _MomentumParamState: ("momentum",),
    _AdamParamState: ("grad_ema", "grad_sq_ema"),
    _AdafactorParamState: ("v_row", "v_col", "v", "m"),
}


def register_checkpoints(serialization) -> None:
    """Tells flax's `serialization` how checkpoints store optimizers."""
    for kind, names in STORED.items():

        def to_state(record, names=names):
            return {name: serialization.to_state_dict(getattr(record, name)) for name in names}

        def from_state(record, state, names=names):
            result = {name: serialization.from_state_dict(getattr(record, name), state[name]) for name in names}
            return record.replace(**result)

        serialization.register_serialization_state(kind, to_state, from_state, override=True)


with contextlib.suppress(ImportError):  # for the copy that `--migrate` puts next to a program
    register_checkpoints(importlib.import_module("flax.serialization"))
