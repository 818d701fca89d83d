"""Stages over pp: every row passes all layers in order and returns; gradients equal those of a plain loop.

All in float64, but for one compiled schedule.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.exact import jaxprs
from shardformer.parallel import pipeline
from shardformer.parallel.pipeline import Pipeline
from tests import asserts, sharded

D = 4


def on_stages(body, pp, in_specs, out_specs, run=sharded.on_mesh):
    return run(body, (pp,), in_specs, out_specs, axes=("pp",))


def layer(x_BD, w_D):
    """Any two of these in the other order give another result."""
    return jnp.tanh(x_BD + w_D[None]) * (1 + w_D[None])


def plain(w_LD, x_BD):
    for w_D in w_LD:
        x_BD = layer(x_BD, w_D)
    return x_BD


def piped(w_lD, x_BD, count, rounds):
    layers_of = pipeline.distribute(w_lD, rounds)

    def scan(x, w):
        return (layer(x, w), None)

    def stage(rows, turn):
        return (lax.scan(scan, rows[0], layers_of(turn))[0], rows[1])

    number_B = lax.axis_index("pp") * len(x_BD) + jnp.arange(len(x_BD))
    return pipeline.run_stages(stage, (x_BD, number_B), Pipeline(lax.axis_size("pp"), count, rounds))


def inputs(pp, count, rounds, rows=2, layers=2):
    w_LD = 0.3 * sharded.normal(0, pp * rounds * layers, D)
    return w_LD, sharded.normal(1, pp * count * rows, D)


SHAPES = [(2, 1, 1), (2, 3, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (4, 1, 2), (2, 3, 4), (4, 2, 3)]


@functools.cache
def worst_gradient_of(pp, count, rounds, run=sharded.on_mesh):
    """Returns the distance of the gradients in layers and rows from those of a plain loop."""
    w_LD, x_BD = inputs(pp, count, rounds)

    def squares(run):
        return lambda w, x: jnp.square(run(w, x)).sum()

    expected = exact.run(jax.grad(squares(plain), (0, 1)), w_LD, x_BD).outputs
    body = jax.grad(squares(lambda w, x: piped(w, x, count, rounds)[0]), (0, 1))
    got = on_stages(body, pp, (P("pp"), P("pp")), (P("pp"), P("pp")), run)(w_LD, x_BD)
    return max(map(asserts.relative, got, expected))


@pytest.mark.parametrize(("pp", "count", "rounds"), SHAPES)
def test_rows_pass_all_layers_in_order_and_return(pp, count, rounds):
    w_LD, x_BD = inputs(pp, count, rounds)

    def body(w, x):
        return piped(w, x, count, rounds)

    got_BD, number_B = on_stages(body, pp, (P("pp"), P("pp")), (P("pp"), P("pp")))(w_LD, x_BD)
    assert asserts.relative(got_BD, exact.run(plain, w_LD, x_BD).outputs) < 1e-14
    assert np.array_equal(number_B, np.arange(len(x_BD)))


@pytest.mark.parametrize(("pp", "count", "rounds"), SHAPES)
def test_gradients_of_stages_equal_a_plain_loop(pp, count, rounds):
    assert worst_gradient_of(pp, count, rounds) < 1e-13


def test_compiled_gradients_of_stages_equal_a_plain_loop():
    assert worst_gradient_of(4, 2, 3, run=sharded.compile_on_mesh) < 2e-6


@pytest.mark.parametrize(("pp", "rounds"), [(2, 2), (2, 3), (4, 2), (4, 6), (8, 3)])
def test_each_stage_receives_the_parts_of_its_rounds(pp, rounds):
    part = np.arange(pp * rounds, dtype=np.int32)

    def every_round(own):
        return jnp.concatenate([pipeline.distribute(own, rounds)(turn) for turn in range(rounds)])

    received = on_stages(every_round, pp, P("pp"), P("pp"))(part)
    assert np.array_equal(np.asarray(received).reshape(pp, rounds), part.reshape(rounds, pp).T)


@pytest.mark.parametrize(("pp", "count", "rounds"), [(2, 3, 1), (4, 2, 1), (4, 2, 3)])
def test_ticks_and_bubble_follow_the_formula(pp, count, rounds):
    w_LD, x_BD = inputs(pp, count, rounds)
    specs = (P("pp"), P("pp")), P("pp")
    body = on_stages(lambda w, x: piped(w, x, count, rounds)[0], pp, *specs, run=sharded.compile_on_mesh)
    operations = itertools.chain.from_iterable(
        each.eqns for each in jaxprs.walk(jax.make_jaxpr(body)(w_LD, x_BD).jaxpr)
    )
    ticks = max(loop.times for loop in map(jaxprs.read_loop, operations) if loop)
    microbatches = pp * count
    assert ticks == rounds * microbatches + pp - 1 == pipeline.count_ticks(microbatches, pp, rounds)
    busy = np.zeros((pp, ticks), int)  # on paper: at tick t, stage s works on unit t - s
    for s in range(pp):
        busy[s, s : s + rounds * microbatches] = 1
    assert 1 - busy.mean() == pytest.approx((pp - 1) / (rounds * microbatches + pp - 1))


def without_onward(broken):
    """The rings: `onward` sends from stage 0 to 1."""
    send = pipeline._send
    broken(pipeline, "_send", lambda tree, pairs: tree if (0, 1) in pairs else send(tree, pairs))


def one_tick_less(broken):
    count = pipeline.count_ticks
    broken(pipeline, "count_ticks", lambda *args: count(*args) - 1)


@pytest.mark.parametrize("mistake", [without_onward, one_tick_less])
def test_mistakes_in_the_schedule_are_detected(broken, mistake):
    mistake(broken)
    assert worst_gradient_of.__wrapped__(4, 2, 1) > 1e-2
