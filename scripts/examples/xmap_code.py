"""A program of 2021, as it was: xmap, named axes, jax.tree_map. It runs on today's JAX, unedited.

    python -m shardformer legacy scripts/examples/xmap_code.py       # run it
    python -m shardformer legacy --check scripts/examples/xmap_code.py      # list what it uses
    python -m shardformer legacy --migrate scripts/examples/xmap_code.py    # print it for shard_map, as a patch

It fits a line of 8 weights: rows are spread over `dp`, weights over `mp`, on 2 x 4 devices, and the loss falls to 0.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import mesh, xmap

ROWS, WEIGHTS, SHARDS = 32, 8, 4


def loss(params, x, y):
    """x is one row's share on one shard, [WEIGHTS / SHARDS]: an instance sees no batch and no other shard."""
    return (lax.psum(jnp.vdot(x, params["w"]), "shard") + params["b"] - y) ** 2


def loss_and_slope(params, x, y):
    value, slope = jax.value_and_grad(loss)(params, x, y)
    # psum's gradient is a psum: each shard's weights get the slope of all shards' losses, which are equal.
    slope["w"] = slope["w"] / SHARDS
    mean = {"w": lax.pmean(slope["w"], "batch"), "b": lax.pmean(slope["b"], ("batch", "shard"))}
    return lax.pmean(value, ("batch", "shard")), mean


step = xmap(
    loss_and_slope,
    in_axes=({"w": ["shard", ...], "b": [...]}, ["batch", "shard", ...], ["batch", ...]),
    out_axes=([...], {"w": ["shard", ...], "b": [...]}),
    axis_resources={"batch": "dp", "shard": "mp"},
)


def main(steps=60):
    random = np.random.RandomState(0)
    x, truth = random.normal(size=(ROWS, WEIGHTS)).astype("f"), random.normal(size=WEIGHTS).astype("f")
    params = {"w": jnp.zeros((SHARDS, WEIGHTS // SHARDS)), "b": jnp.zeros(())}
    with mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "mp")):
        for i in range(steps):
            value, slope = step(params, x.reshape(ROWS, SHARDS, -1), x @ truth + 1.0)
            params = jax.tree_map(lambda p, g: p - 0.1 * g, params, slope)
            if i % 20 == 0 or i == steps - 1:
                print(f"step {i}: loss {value:.5f}")
    print(f"bias {params['b']:.2f}, which should be 1.00")
    return float(value)


if __name__ == "__main__":
    main()
