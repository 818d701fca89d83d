"""The matrix products of a train step only: an upper bound on the speed of a step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.bench.contenders import Contender
from shardformer.config import Config
from shardformer.layout import mesh


def products_alone(c: Config, batches) -> Contender:
    """Returns the products at each device's shapes, forward and backward, layer by layer; no collectives."""
    del batches
    devices = mesh.make(c)
    shapes = layer_products(c)
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), c.parallel.dtype)

    layer = [(draw(B, m, k), draw(B, k, n), draw(B, m, n)) for B, m, k, n in shapes]
    m, k, n = head_product(c)
    head = draw(1, m, k), draw(1, k, n), draw(1, m, n)

    def run(layer, head):
        def one(carry, scale):  # scaled, so that no two layers have the same products
            return carry + sum(_products(x * scale, w, dy) for x, w, dy in layer), None

        total, _ = lax.scan(
            one, jnp.float32(0), jnp.arange(1, c.model.layers // c.parallel.pp + 1).astype(c.parallel.dtype)
        )
        return total + _products(*head)

    same = jax.shard_map(run, mesh=devices, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    operands = jax.device_put((layer, head), jax.NamedSharding(devices, P()))
    compiled = jax.jit(same).lower(*operands).compile()
    return Contender(
        f"products alone {c.parallel.mesh}",
        c.parallel.devices,
        lambda _, __: (None, compiled(*operands)),
        None,
        [compiled],
    )


def layer_products(c: Config) -> list[tuple[int, int, int, int]]:
    """Returns (count, m, k, n) of each forward product of one layer on one device.

    A windowed layer multiplies with the keys in its window; layers of two or more windows count with the mean.
    """
    rows, T, D, K = c.training.batch // c.parallel.dp, c.model.seq, c.model.d_model, c.model.head_size
    tokens, heads, f = rows * T, c.model.heads // c.parallel.mp, c.model.ff_size // c.parallel.mp
    by_columns = [(1, tokens, D, heads * K), *[(1, tokens, D, -(-c.model.key_value_heads // c.parallel.mp) * K)] * 2]
    by_columns += [(1, tokens, D, f)] * (2 if c.model.gated else 1)
    keys = round(sum(min(window or T, T) for window in c.model.layer_windows) / c.model.layers)
    attention = [(rows * heads, T, K, keys), (rows * heads, T, keys, K)]
    return [*by_columns, (1, tokens, heads * K, D), (1, tokens, f, D), *attention]


def head_product(c: Config) -> tuple[int, int, int]:
    return (
        c.training.batch // (c.parallel.dp * c.parallel.pp) * c.model.seq,
        c.model.d_model,
        c.model.padded_vocab // c.parallel.mp,
    )


def count_flops(c: Config) -> int:
    """Returns the FLOPs of all devices, forward and backward."""
    each = c.model.layers // c.parallel.pp * sum(math.prod(shape) for shape in layer_products(c)) + math.prod(
        head_product(c)
    )
    return 3 * 2 * each * c.parallel.devices


def _products(x, w, dy):
    """Computes x w, dy w^T and x^T dy; the barrier keeps XLA from reducing each to the one number that is read."""
    y, dx, dw = lax.optimization_barrier(
        (
            jnp.einsum("bmk,bkn->bmn", x, w),
            jnp.einsum("bmn,bkn->bmk", dy, w),
            jnp.einsum("bkm,bmn->bkn", lax.optimization_barrier(x.mT), dy),
        )
    )
    return sum(product[0, 0, 0].astype(jnp.float32) for product in (y, dx, dw))
