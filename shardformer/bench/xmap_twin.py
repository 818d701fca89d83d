"""The plain model split by hand under `xmap`, like GPT-J's code: Megatron's f and g, an optimizer in every shard."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer import legacy
from shardformer.bench import reference
from shardformer.bench.contenders import Contender
from shardformer.bench.reference import plain_specs
from shardformer.config import Config
from shardformer.layout import mesh


@jax.custom_vjp
def enter(x):
    """Returns x, before a product that is split by columns; the gradients of all shards are summed."""
    return x


enter.defvjp(lambda x: (x, None), lambda _, gradient: (lax.psum(gradient, "mp"),))


@jax.custom_vjp
def leave(x):
    """Sums the partial results of a product that is split by rows."""
    return lax.psum(x, "mp")


leave.defvjp(lambda x: (lax.psum(x, "mp"), None), lambda _, gradient: (gradient,))


def look_up(table_vD, tokens):
    """Looks up the tokens' rows in this shard's part of the table and sums over the shards."""
    row = tokens - lax.axis_index("mp") * len(table_vD)
    in_shard = (row >= 0) & (row < len(table_vD))
    return leave(jnp.where(in_shard[..., None], table_vD[jnp.where(in_shard, row, 0)], 0.0))


def cross_entropy(vocab: int, logits_BTv, targets):
    """Returns (nats, log-partition) of every token, from this shard's part of the vocabulary."""
    first = lax.axis_index("mp") * logits_BTv.shape[-1]
    real = first + jnp.arange(logits_BTv.shape[-1]) < vocab
    logits = jnp.where(real[None, None], logits_BTv, -1e30)
    largest = lax.pmax(lax.stop_gradient(logits).max(-1), "mp")
    log_z = largest + jnp.log(leave(jnp.exp(logits - largest[..., None]).sum(-1)))
    column = targets - first
    in_shard = (column >= 0) & (column < logits.shape[-1])
    target = jnp.take_along_axis(logits, jnp.where(in_shard, column, 0)[..., None], axis=-1)[..., 0]
    return log_z - leave(jnp.where(in_shard, target, 0.0)), log_z


def xmapped(c: Config, batches) -> Contender:
    """Returns the step under xmap; as in mesh-transformer-jax, the state leads with mp and the batch with dp."""
    cut = reference.Cut(c.parallel.mp, enter, leave, look_up, functools.partial(cross_entropy, c.model.vocab))
    model = hk.without_apply_rng(hk.transform(lambda tokens, targets: reference.forward(c, tokens, targets, cut)))
    params = reference.initial_parameters(c)
    dimensions = split_dimensions(params, c)

    def grads_of(params, batch):
        def objective(params):
            return model.apply(params, batch["tokens"], batch["targets"])

        values, grads = jax.value_and_grad(objective, has_aux=True)(params)
        return lax.pmean((values, grads), "dp")

    optimizer, update = reference.make_update(c, grads_of, functools.partial(_clip, c.optimizer.clip, dimensions))
    params = {
        module: {
            name: stack_shards(np.asarray(x), dimensions[module][name], c.parallel.mp) for name, x in leaves.items()
        }
        for module, leaves in params.items()
    }
    state = params, jax.vmap(optimizer.init)(params)
    resources: dict = {"dp": "dp", "mp": "mp"}
    step = legacy.xmap(update, (["mp", ...], ["dp", ...]), (["mp", ...], [...]), axis_resources=resources,
                       donate_argnums=0, axis_sizes={"dp": c.parallel.dp, "mp": c.parallel.mp})  # fmt: skip
    devices = mesh.make(c).devices

    def split_rows(batch):
        return {name: rows.reshape(c.parallel.dp, -1, c.model.seq) for name, rows in batch.items()}

    with legacy.mesh(devices, ("dp", "mp")):
        program = step.lower(state, split_rows(batches[0])).compile()  # type: ignore[attr-defined]  # xmap's result has lower()

    def advance(state, number):
        with legacy.mesh(devices, ("dp", "mp")):
            return step(state, split_rows(batches[number]))

    return Contender(f"xmap {c.parallel.mesh}", c.parallel.devices, advance, state, [program])


def stack_shards(leaf: np.ndarray, dimension: int | None, mp: int) -> np.ndarray:
    """Returns the mp shards of a parameter on a new leading axis; without a dimension, mp copies."""
    return np.stack(np.split(leaf, mp, dimension) if dimension is not None else [leaf] * mp)


def split_dimensions(params, c: Config):
    """Returns the dimension of each parameter that is split over mp, or None; positions are replicated here."""
    return {
        module: {name: None if name == "positions" else _find_split(spec) for name, spec in leaves.items()}
        for module, leaves in plain_specs(params, c).items()
    }


def _find_split(spec) -> int | None:
    return next((d for d, axis in enumerate(spec) if axis), None)


def _clip(limit: float, dimensions, grads):
    """Clips by the norm of the full gradient: squares of split leaves are summed over mp, others are replicated."""
    if not limit:
        return grads
    split = whole = jnp.zeros(())
    for module, leaves in grads.items():
        for name, gradient in leaves.items():
            square = jnp.sum(jnp.square(gradient))
            if dimensions[module][name] is None:
                whole += square
            else:
                split += square
    norm = jnp.sqrt(lax.psum(split, "mp") + whole)
    return jax.tree.map(lambda gradient: jnp.where(norm < limit, gradient, gradient / norm * limit), grads)
