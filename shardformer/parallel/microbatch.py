"""optax's microbatching for functions of shards: a mean over examples unless specified otherwise.

`microbatch` and `micro_vmap` run under `shard_map` as optax wrote them. optax's `micro_grad` is wrong there: the
gradient in a parameter that does not vary over `dp` is summed over `dp`, so one example's gradient becomes the sum of
one example's from every shard. `micro_grad` here makes parameters vary first.
"""

from collections.abc import Callable

import jax
from optax.microbatching import AccumulationType, micro_vmap
from optax.microbatching import micro_grad as _micro_grad
from optax.microbatching import microbatch as _microbatch

from shardformer.collectives import vary_like

__all__ = ["AccumulationType", "micro_grad", "micro_vmap", "microbatch"]

MEAN = AccumulationType.MEAN  # optax's default is SUM, where `MultiSteps` and a loss over the whole batch average


def microbatch(
    fun: Callable, argnums, microbatch_size: int | None, accumulator=MEAN, *, argnames=(), in_axes=0
) -> Callable:
    """Returns `fun` of a batch, accumulated over parts of `microbatch_size` rows in sequence.

    Part i of n has the rows i, n + i, 2n + i...: values that depend on a row's index must come with the batch.
    """
    return _microbatch(fun, argnums, microbatch_size, accumulator, argnames=argnames, in_axes=in_axes)


def micro_grad(
    fun: Callable,
    has_aux=False,
    argnums=0,
    *,
    batch_argnums=1,
    keep_batch_dim=True,
    microbatch_size: int | None = None,
    accumulator=MEAN,
    transform_fn: Callable = lambda gradient: gradient,
    metrics_fn: Callable = lambda gradient: None,
) -> Callable:
    """Returns a function that gives (accumulated gradient, (values, metrics, aux) of each example).

    In shard view both cover only the shard's examples: take a `pmean` of the gradient over the axes of the batch.
    """
    grad = _micro_grad(
        fun,
        has_aux,
        argnums,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        microbatch_size=microbatch_size,
        accumulator=accumulator,
        transform_fn=transform_fn,
        metrics_fn=metrics_fn,
    )

    def grad_of_shard(*args, **kwargs):
        batch = jax.tree.leaves(([args[i] for i in _indices(batch_argnums)], kwargs))
        differentiated = _indices(argnums)
        return grad(*[vary_like(arg, *batch) if i in differentiated else arg for i, arg in enumerate(args)], **kwargs)

    return grad_of_shard


def _indices(argnums) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
