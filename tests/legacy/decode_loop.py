"""The cost of an xmap that Python calls once per token: a small BLOOM (attention with ALiBi) on a mesh of 1x8.

    python tests/legacy/decode_loop.py [TOKENS]

under today's jax, 0.4.13 or 0.4.30. It prints the milliseconds of a decoding step, and those of a step that only passes
the same 200 arrays on, which is what a call itself costs.
"""

import os
import pathlib
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

try:
    from jax.experimental.maps import xmap
except ImportError:
    sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))  # before an installed shardformer
    import shardformer.legacy

    shardformer.legacy.install()
    from jax.experimental.maps import xmap

LAYERS, SHARDS, WIDTH, HEAD, LENGTH, VOCABULARY = 25, 8, 16, 4, 32, 64


def numbers(key, *shape):
    return np.random.RandomState(key).normal(0, 0.2, (SHARDS, *shape)).astype(np.float32)


def new_state():
    shapes = {"q": (WIDTH, HEAD), "k": (WIDTH, HEAD), "v": (WIDTH, HEAD), "o": (HEAD, WIDTH)}
    shapes |= {"up": (WIDTH, 2 * HEAD), "down": (2 * HEAD, WIDTH)}
    weights = [{name: numbers(n, *shape) for n, (name, shape) in enumerate(shapes.items())} for _ in range(LAYERS)]
    caches = [{name: np.zeros((SHARDS, LENGTH, HEAD), np.float32) for name in "kv"} for _ in range(LAYERS)]
    return weights, caches


def attend(weights, cache, x, position):
    """One head of each shard, whose keys are penalized by their distance."""
    cache = {name: cache[name].at[position].set(x @ weights[name]) for name in "kv"}
    slope = 2.0 ** -(1.0 + jax.lax.axis_index("shard").astype(jnp.float32))
    distance = (jnp.arange(LENGTH) - position).astype(jnp.float32)
    scores = cache["k"] @ (x @ weights["q"]) / 2 + slope * distance
    chances = jax.nn.softmax(jnp.where(distance > 0, -1e9, scores))
    return (chances @ cache["v"]) @ weights["o"], cache


def decode(weights, caches, embedding, token, position):
    x = embedding[token]
    new_caches = []
    for layer, cache in zip(weights, caches):  # noqa: B905
        attention, cache = attend(layer, cache, x, position)
        x = x + jax.lax.psum(attention + jax.nn.gelu(x @ layer["up"]) @ layer["down"], "shard")
        new_caches.append(cache)
    return jnp.argmax(embedding @ x), new_caches


def passed_on(weights, caches, token):
    return weights, caches, token + 1


def main(tokens=64):
    weights, caches = new_state()
    embedding = numbers(9, VOCABULARY, WIDTH)[0]
    sharded, resources = ["shard", ...], {"axis_resources": {"shard": "mp"}}
    step = xmap(decode, (sharded, sharded, [...], [...], [...]), ([...], sharded), **resources)
    same = xmap(passed_on, (sharded, sharded, [...]), (sharded, sharded, [...]), **resources)
    with Mesh(np.array(jax.devices()).reshape(1, 8), ("dp", "mp")):
        weights, caches, token = same(weights, caches, jnp.int32(1))
        text, decoding, passing = [], [], []
        for position in range(tokens):
            started = time.perf_counter()
            token, caches = step(weights, caches, embedding, token, jnp.int32(position % LENGTH))
            text.append(int(token))
            decoding.append(time.perf_counter() - started)
        for _ in range(tokens):
            started = time.perf_counter()
            weights, caches, token = same(weights, caches, token)
            jax.block_until_ready(token)
            passing.append(time.perf_counter() - started)
    print(f"jax {jax.__version__}: {tokens} tokens, ids sum to {sum(text)}")
    for what, seconds in (("a decoding step", decoding), ("a call alone, of 201 arrays", passing)):
        print(f"  {what}: {1e3 * np.median(seconds[2:]):.1f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
