"""Random keys, bits and numbers are JAX's: bits and integers exactly, with and without jax_threefry_partitionable."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.errors import UsageError
from shardformer.exact import random_bits
from tests.exact.comparison import Comparison, bits, case, find_unnoticed, floats, integers, rules_of

KEY = bits(2, dtype=np.uint32)
SHAPES = (), (1,), (7,), (2, 3, 4), (0,)


def of_key(function):
    """Returns a function of a key's words; its keys become words too."""

    def apply(words, *arguments):
        results = jax.tree.leaves(function(jax.random.wrap_key_data(words), *arguments))
        return [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in results]

    return apply


def draw_with_raw_key(words):
    with jax.legacy_prng_key("allow"):  # the flag's later default is an error
        return jax.random.bits(words, (3,))


def list_keys():
    seed, data = integers(low=-(2**31), high=2**31 - 1), integers(low=0, high=2**31 - 1)
    return {
        "key": case(of_key(lambda key, seed: jax.random.key(seed)), KEY, seed),
        "key of bytes": case(of_key(lambda key, seed: jax.random.key(seed)), KEY, bits(dtype=np.uint8)),
        "PRNGKey": case(of_key(lambda key, seed: jax.random.PRNGKey(seed)), KEY, seed),
        "keys": case(of_key(lambda key, seed: jax.vmap(jax.random.key)(seed)), KEY, bits(5)),
        "fold_in": case(of_key(jax.random.fold_in), KEY, data),
        "fold_in each": case(
            of_key(lambda key, data: jax.vmap(jax.random.fold_in, (None, 0))(key, data)), KEY, bits(5)
        ),
        "split": case(of_key(lambda key: [jax.random.split(key, shape) for shape in (2, 1, 5, (2, 3))]), KEY),
        "split each": case(
            of_key(lambda key: jax.vmap(lambda k: jax.random.split(k, 3))(jax.random.split(key, 4))), KEY
        ),
        "keys of rows": case(of_key(lambda key: [jax.random.split(key, 5)[3], jax.random.split(key, 4)[::2]]), KEY),
        "moved keys": case(of_key(lambda key: jnp.stack([jax.random.split(key, 3), jax.random.split(key, 3)], 1)), KEY),
        "cloned": case(of_key(jax.random.clone), KEY),
        "raw keys": case(draw_with_raw_key, KEY),
        "threefry2x32": case(
            lambda words, count: jax.extend.random.threefry_2x32(words, count), KEY, bits(7, dtype=np.uint32)
        ),
    }


def list_bits():
    cases = {}
    for dtype in np.uint8, np.uint16, np.uint32, np.uint64:
        for shape in SHAPES if dtype == np.uint32 else SHAPES[2:4]:
            draw = of_key(functools.partial(jax.random.bits, shape=shape, dtype=dtype))
            cases[f"bits {np.dtype(dtype)} {shape}"] = case(draw, KEY)
        each = functools.partial(jax.random.bits, shape=(5,), dtype=dtype)
        cases[f"bits of keys {np.dtype(dtype)}"] = case(
            of_key(lambda key, each=each: jax.vmap(each)(jax.random.split(key, 3))), KEY
        )
    return cases


def list_distributions():
    random, logits = jax.random, floats(4, 6, dtype=np.float32)
    functions = {
        "normal": lambda key: random.normal(key, (3, 5), np.float32),
        "uniform": lambda key: random.uniform(key, (3, 5), np.float32, -1, 2),
        "uniform bfloat16": lambda key: random.uniform(key, (9,), jnp.bfloat16),
        "bernoulli": lambda key: random.bernoulli(key, np.float32(0.3), (40,)),
        "permutation": lambda key: random.permutation(key, 20),
        "shuffled rows": lambda key: random.permutation(key, jnp.arange(12, dtype=np.int32).reshape(4, 3)),
        "gumbel": lambda key: random.gumbel(key, (9,), np.float32),
        "truncated_normal": lambda key: random.truncated_normal(key, -2.0, 2.0, (9,), np.float32),
        "randint": lambda key: random.randint(key, (30,), -5, 1000),
        "randint of bytes": lambda key: random.randint(key, (30,), 0, 77, np.uint8),
        "randint of 64 bits": lambda key: random.randint(key, (30,), 0, 2**40, np.int64),
        "choice": lambda key: random.choice(key, 9, (5,), replace=False),
        "exponential": lambda key: random.exponential(key, (5,), np.float32),
        "laplace": lambda key: random.laplace(key, (5,), np.float32),
        "rademacher": lambda key: random.rademacher(key, (20,), np.int32),
    }
    cases = {name: case(of_key(function), KEY, most=3e-6) for name, function in functions.items()}
    cases["categorical"] = case(of_key(lambda key, logits: random.categorical(key, logits, axis=1)), KEY, logits)
    cases["dropout"] = case(of_key(drop), KEY, logits, most=1e-6)
    return cases


def drop(key, x):
    return jnp.where(jax.random.bernoulli(key, np.float32(0.9), x.shape), x / np.float32(0.9), 0)


@pytest.fixture(scope="module", params=[True, False], ids=["partitionable", "not partitionable"])
def compared(request):
    @contextlib.contextmanager
    def setting():
        with jax.enable_x64(True), jax.threefry_partitionable(request.param):
            yield

    # All distributions are of bits, which the second setting changes.
    distributions = list_distributions() if request.param else {}
    return Comparison(list_keys() | list_bits() | distributions, setting=setting)


@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_draws_are_those_of_jax(compared, where):
    assert not list(compared.list_differences(where))


def test_each_wrong_rule_is_noticed(compared):
    assert not find_unnoticed(compared, rules_of(random_bits))


def test_each_rule_has_a_case(compared):
    assert rules_of(random_bits) <= compared.operations


def test_key_of_another_generator_is_rejected():
    with pytest.raises(UsageError, match=r"random_seed with keys of .*rbg.*impl='threefry2x32'.*test_random_bits\.py"):
        exact.run(lambda seed: jax.random.bits(jax.random.key(seed, impl="rbg")), np.int32(3))
