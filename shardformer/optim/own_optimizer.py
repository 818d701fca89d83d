"""`optimizer=FILE.py:NAME`: a function of the user, of a file or registered, that returns any optax transformation.

Everything that could fail in a step is tried by shapes when the state is made: before the first step, and without
compilation. ZeRO and the checkpoint follow from the shapes of the state; see `chain.state_specs`.
"""

import contextlib
import inspect
from collections.abc import Iterator

import jax
import optax

from shardformer.config.registries import OWN, call_with
from shardformer.errors import UsageError, forbid_exit
from shardformer.optim.optimizers import OPTIMIZERS
from shardformer.user_code import import_function

TAKES = "optimizer takes FILE.py:NAME, a function such as `def lion(rate): return optax.lion(rate)`"


def make_own_optimizer(name: str, inputs: dict) -> optax.GradientTransformationExtraArgs:
    """Calls the function with those of the inputs that its parameters name, and returns its checked result."""
    if name == OWN:
        raise UsageError(
            "the optimizer of this run is a function of a user's file, which no run stores; name it again: "
            "optimizer=FILE.py:NAME"
        )
    function = OPTIMIZERS.get(name) or import_function("optimizer", name, TAKES)
    _check_parameters(name, function, inputs)
    with _reporting(name, "the function"):
        made = call_with(function, inputs)
    if not isinstance(made, optax.GradientTransformation):
        raise UsageError(
            f"optimizer={name} returns a {type(made).__name__}, expected an optax GradientTransformation; {TAKES}"
        )
    return _check_shapes(name, optax.with_extra_args_support(made))


def _check_parameters(name: str, function, inputs: dict) -> None:
    """Raises UsageError if a function needs an argument that is not there."""
    with _reporting(name, "its signature"):
        parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    unknown = [each.name for each in named if each.name not in inputs and each.default is each.empty]
    if unknown:
        raise UsageError(
            f"optimizer={name} has the parameters {', '.join(unknown)}; a function may have some of {', '.join(inputs)}"
        )


def _check_shapes(name: str, optimizer: optax.GradientTransformationExtraArgs):
    """Wraps an optimizer so that `init` tries an update by shapes."""

    def init(params):
        with _reporting(name, "init"), jax.numpy_dtype_promotion("standard"):
            state = optimizer.init(params)
        step = jax.ShapeDtypeStruct((), "int32")
        with _reporting(name, "update"), jax.numpy_dtype_promotion("standard"):
            updates, after = jax.eval_shape(optimizer.update, params, state, params, step=step)
        _check_same(name, "updates", updates, "the parameters", params)
        _check_same(name, "the state after an update", after, "the state before", state)
        return state

    return optax.GradientTransformationExtraArgs(init, optimizer.update)


def _check_same(name: str, what: str, got, where: str, wanted) -> None:
    """Raises UsageError unless two trees have arrays of equal names, shapes and dtypes."""
    got, wanted = (_describe_arrays(tree) for tree in (got, wanted))
    for path in (*wanted, *got):
        if got.get(path) != wanted.get(path):
            raise UsageError(
                f"optimizer={name}: {what} must be like {where}: {path} is {got.get(path)}, expected {wanted.get(path)}"
            )


def _describe_arrays(tree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: tree))
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


@contextlib.contextmanager
def _reporting(name: str, what: str) -> Iterator[None]:
    """Raises UsageError for any exception of the user's code."""
    try:
        with forbid_exit(what):
            yield
    except Exception as error:  # the file may raise anything
        message = " ".join(str(error).split())
        raise UsageError(f"optimizer={name}: {what} raises {type(error).__name__}: {message:.200}") from None
