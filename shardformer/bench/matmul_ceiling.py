"""The matrix products of a train step and nothing else: as fast as a step could be if all the rest cost nothing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.bench.contenders import Contender
from shardformer.config import Config
from shardformer.parallel import mesh


def products_alone(c: Config, batch) -> Contender:
    """At each device's own shapes, forward and backward, one layer after the other; no collectives."""
    del batch
    devices = mesh.make(c)
    shapes = layer_products(c)
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), c.dtype)
    layer = [(draw(B, m, k), draw(B, k, n), draw(B, m, n)) for B, m, k, n in shapes]
    m, k, n = head_product(c)
    head = draw(1, m, k), draw(1, k, n), draw(1, m, n)

    def run(layer, head):
        def one(carry, scale):  # scaled, so that no layer's products are another's
            return carry + sum(_products(x * scale, w, dy) for x, w, dy in layer), None

        total, _ = lax.scan(one, jnp.float32(0), jnp.arange(1, c.layers // c.pp + 1).astype(c.dtype))
        return total + _products(*head)

    same = jax.shard_map(run, mesh=devices, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    operands = jax.device_put((layer, head), jax.NamedSharding(devices, P()))
    compiled = jax.jit(same).lower(*operands).compile()
    return Contender(f"products alone {c.mesh}", c.devices, lambda _, __: (None, compiled(*operands)), None, [compiled])


def layer_products(c: Config) -> list[tuple[int, int, int, int]]:
    """(count, m, k, n) of one layer's forward products on one device."""
    rows, T, D, K = c.batch // c.dp, c.seq, c.d_model, c.head_size
    tokens, heads, f = rows * T, c.heads // c.mp, c.ff_size // c.mp
    by_columns = [(1, tokens, D, heads * K), *[(1, tokens, D, c.key_value_heads // c.mp * K)] * 2]
    by_columns += [(1, tokens, D, f)] * (2 if c.activation == "swiglu" else 1)
    attention = [(rows * heads, T, K, T), (rows * heads, T, T, K)]
    return [*by_columns, (1, tokens, heads * K, D), (1, tokens, f, D), *attention]


def head_product(c: Config) -> tuple[int, int, int]:
    return c.batch // (c.dp * c.pp) * c.seq, c.d_model, c.padded_vocab // c.mp


def count_flops(c: Config) -> int:
    """Of all devices, forward and backward."""
    each = c.layers // c.pp * sum(math.prod(shape) for shape in layer_products(c)) + math.prod(head_product(c))
    return 3 * 2 * each * c.devices


def _products(x, w, dy):
    """x w, dy w^T and x^T dy, each kept from being folded into the one number that is asked of it."""
    y, dx, dw = lax.optimization_barrier(
        (
            jnp.einsum("bmk,bkn->bmn", x, w),
            jnp.einsum("bmn,bkn->bmk", dy, w),
            jnp.einsum("bkm,bmn->bkn", lax.optimization_barrier(x.mT), dy),
        )
    )
    return sum(product[0, 0, 0].astype(jnp.float32) for product in (y, dx, dw))
