"""A proof without devices: your own shard function on 512 devices, and the line of a collective that is wrong.

    python scripts/examples/prove_a_mesh.py

All devices run in lockstep in NumPy, in float64: a right program agrees with one device to 1e-15, so that a wrong one
has no tolerance to hide in. It takes seconds, and no accelerator.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardformer

WIDTH, HIDDEN, ROWS = 8, 32, 64


def dense(x, up, down):
    """The function on one device."""
    return jnp.tanh(x @ up) @ down


def sharded(x, up, down):
    """The same for one shard: `up` has this shard's columns and `down` its rows, so that products must be added up."""
    return lax.psum(jnp.tanh(x @ up) @ down, "mp")


def forgetful(x, up, down):
    """The same mistake that everybody makes once."""
    return jnp.tanh(x @ up) @ down


def check(function, mesh):
    """Returns the differences from the function of one device, in words; none if it is right."""
    random = np.random.default_rng(0)
    arguments = tuple(random.normal(size=it).astype("f") for it in ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    specs = P("dp"), P(None, "mp"), P("mp")
    return shardformer.verify_function(function, dense, arguments, specs, P("dp"), [mesh])


def main(dp=64, mp=8):
    right, wrong = (check(function, {"dp": dp, "mp": mp}) for function in (sharded, forgetful))
    print("with its psum:", *right or ["equal to one device on every one of the devices"])
    print("without it:", *wrong, sep="\n  ")
    return right, wrong


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
