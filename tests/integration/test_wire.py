"""The least that a train step can send, in compiled HLO: tensors and bytes, because XLA merges operations."""

import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.analysis import program_collectives
from shardformer.config.names import MATRICES
from shardformer.layout import mesh, specs
from shardformer.model import Decoder
from shardformer.parallel import replicas
from shardformer.shards import layer
from shardformer.training.trainer import Trainer
from tests import sharded, shared, tiers, wire

L, D, T, V, BATCH = 3, 16, 12, 512, 8  # a slice of the logits is much larger than the activations
BATCH_SHAPES = {name: jax.ShapeDtypeStruct((BATCH, T), jnp.int32) for name in ("tokens", "targets")}
DROPOUT_KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
# Each mesh, block and way to run the layers once; test_step_collectives.py has more of them, traced.
LAYOUTS = [("4x2", "parallel", True), ("2x4", "sequential", False)]


def new_trainer(**overrides):
    config = shared.tiny(layers=L, d_model=D, heads=4, seq=T, vocab=V, batch=BATCH, **overrides)
    return Trainer(config, mesh.make(config))


def sent(t, jitted, *args):
    """{axis: what a function sends over it}."""
    return sent_by(t, jitted.lower(*args))


def sent_by(t, lowered):
    by_axis = {"dp": [], "mp": []}
    for found in program_collectives.parse_collectives(lowered.compile().as_text()):
        by_axis[found.over(t.config.parallel.mesh_shape)].append(found)  # none crosses both
    return by_axis


def sent_by_step(t):
    return sent_by(t, t.lower(t.abstract, BATCH_SHAPES)[0])


@functools.cache
def step(mesh, block, scan):
    """(trainer, what its step sends)."""
    t = new_trainer(mesh=mesh, block=block, scan=scan)
    return t, sent_by_step(t)


def count(found, in_loop):
    return Counter(c.shape for c in found if c.in_loop == in_loop)


def activation(t):
    return (BATCH // t.config.parallel.dp, T, D)


# Lowered programs, which name every collective but those that XLA itself adds.

STEPS = {
    "8x1": {},
    "1x8": {},
    "2x4": {"optimizer": "muon"},
    "4x2": {"optimizer": "muon", "zero": 1},
    "1x2": {"optimizer": "muon", "block": "sequential"},
    "2x2": {"zero": 3},
    "2x1x2": {"accum": 2, "optimizer": "muon", "zero": 1},
    "2x2x2": {"accum": 2},
    "dp2.cp2.mp2": {"context_parallel": "gather", "zero": 3},
}


def lowered_text(mesh, **options) -> tuple:
    t = shared.trainer(mesh=mesh, layers=8, **options)
    (lowered,) = t.lower(t.abstract, shared.batch())
    return t, lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", STEPS)
def test_step_sends_what_the_formula_counts(mesh):
    t, text = lowered_text(mesh, **STEPS[mesh])
    found = wire.find_lowered(text, dict(t.model.mesh.shape))
    assert found == wire.count_lowered(t.config)
    assert sum(count for (_, _, is_scalar), count in found.items() if is_scalar) <= 3


def test_one_device_sends_nothing():
    assert not wire.find_lowered(lowered_text("1x1")[1], {"dp": 1, "mp": 1})


def test_a_sum_over_one_device_would_be_seen():
    summed = sharded.compile_on_mesh(lambda x: lax.psum(x, "mp"), (8, 1), P("dp", "mp"), P("dp"))
    found = wire.find_lowered(summed.lower(np.ones((8, 8))).as_text(), {"dp": 8, "mp": 1})
    assert found == {("all_reduce", "", False): 1}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "block", "scan"), LAYOUTS)
def test_layers_send_one_activation_each_way_per_sum_over_mp(mesh, block, scan):
    t, by_axis = step(mesh, block, scan)
    each_layer = 2 * wire.LAYER_SUMS[block]  # forward and backward
    in_loop, outside = (count(by_axis["mp"], in_loop) for in_loop in (True, False))
    if scan:
        assert in_loop == {activation(t): each_layer}
        assert outside[activation(t)] == wire.OUTER_SUMS
    else:
        assert not in_loop
        assert outside[activation(t)] == wire.count_activation_sums(t.config)
    del outside[activation(t)]
    tokens = (BATCH // t.config.parallel.dp, T)
    assert outside.pop(tokens) == wire.LOSS_SUMS
    assert outside == wire.NORMS


@pytest.mark.parametrize(("mesh", "block", "scan"), tiers.shorten(LAYOUTS))
def test_no_logits_cross_the_wire(mesh, block, scan):
    t, by_axis = step(mesh, block, scan)
    largest = max(c.bytes for c in by_axis["mp"])
    assert largest == 4 * (BATCH // t.config.parallel.dp) * T * D
    assert largest < 4 * (BATCH // t.config.parallel.dp) * T * V // t.config.parallel.mp
    assert {c.operation for c in by_axis["mp"]} == {"all-reduce"}


def test_gathered_logits_would_be_seen():
    t = new_trainer(mesh="4x2")
    whole = t.model.sharding(P("dp"))
    by_axis = sent(t, jax.jit(Decoder(t.model).logits, out_shardings=whole), t.model.abstract, BATCH_SHAPES["tokens"])
    assert max(c.bytes for c in by_axis["mp"]) >= 4 * 2 * T * V // 2


@pytest.mark.parametrize(("mesh", "block", "scan"), tiers.shorten(LAYOUTS))
def test_every_gradient_is_reduced_once_over_dp_after_the_loop(mesh, block, scan):
    t, by_axis = step(mesh, block, scan)
    assert not count(by_axis["dp"], in_loop=True)
    assert count(by_axis["dp"], in_loop=False) == wire.count_gradients(t) + wire.LOSSES


@pytest.mark.parametrize("block", ["parallel", "sequential"])
def test_forward_pass_sends_only_its_sums(block):
    t = new_trainer(mesh="4x2", block=block)
    by_axis = sent(t, jax.jit(lambda *args: t.model.evaluate(*args)[1]), t.model.abstract, BATCH_SHAPES)
    assert count(by_axis["mp"], in_loop=True) == {activation(t): wire.LAYER_SUMS[block]}
    assert count(by_axis["mp"], in_loop=False) == {activation(t): 1, (2, T): wire.LOSS_SUMS}
    assert count(by_axis["dp"], in_loop=False) == {(): 3}


# ZeRO-3.


def matrices(t):
    """The shapes of a layer's matrices, as a shard of the model that holds them whole has them."""
    shapes = {
        name: t.model.shapes["transformer/layers"][name].shape[1:]
        for name in MATRICES
        if name in t.model.shapes["transformer/layers"]
    }

    def split(name, d):
        return specs.parameter_spec(f"transformer/layers/{name}", t.config)[1 + d] == "mp"

    return {
        name: tuple(size // (t.config.parallel.mp if split(name, d) else 1) for d, size in enumerate(shape))
        for name, shape in shapes.items()
    }


def test_zero_3_gathers_each_layer_forward_and_backward():
    """Kept from the forward pass, they would be the whole model on every device."""
    t = new_trainer(mesh="4x2", zero=3)
    by_axis = sent(t, jax.jit(t.model.loss_and_grad), t.model.abstract, BATCH_SHAPES, DROPOUT_KEY)
    gathered = Counter(c.shape for c in by_axis["dp"] if c.in_loop and c.operation == "all-gather" and len(c.shape) > 1)
    assert gathered == Counter(2 * list(matrices(t).values()))
    scattered = [c for c in by_axis["dp"] if c.in_loop and c.operation == "reduce-scatter" and len(c.shape) > 1]
    of_one_dp = sum(4 * math.prod(shape) // t.config.parallel.dp for shape in matrices(t).values())
    assert sum(c.bytes for c in scattered) == of_one_dp
    assert count(by_axis["mp"], in_loop=True) == {activation(t): 2}  # no sum over mp is made twice


def test_zero_3_gathers_bfloat16_and_sums_float32():
    """As it is lowered: XLA's CPU has no exchange of bfloat16 and widens it."""
    t = new_trainer(mesh="4x2", zero=3, dtype="bfloat16")
    text = t.lower(t.abstract, BATCH_SHAPES)[0].as_text()

    def results(operation):
        return Counter(re.findall(rf'"stablehlo.{operation}".*?-> tensor<([^>]*)>', text, re.DOTALL))

    whole = Counter("x".join(map(str, shape)) + "xbf16" for shape in matrices(t).values())
    head = Counter([f"{D}x{V // t.config.parallel.mp}xbf16"])
    assert {name: times for name, times in results("all_gather").items() if "bf16" in name} == whole + whole + head
    assert results("reduce_scatter")
    assert not [name for name in results("reduce_scatter") if "bf16" in name]


# `linear` refuses both of these mistakes. A plain product takes them, and this is what they cost.


@pytest.fixture
def plain_products(broken):
    broken(layer, "linear", lambda x, w: x @ w)


def without_fan_out(broken):
    broken(collectives, "fan_out", lambda x, *_: x)


def without_the_cast_to_dp(broken):
    broken(replicas.Replicated, "make_local", lambda self, params: params)


@pytest.mark.parametrize("mistake", [without_fan_out, without_the_cast_to_dp])
def test_a_missing_cast_is_refused(broken, mistake):
    mistake(broken)
    with pytest.raises(ValueError, match=r"manual axis types do not match|doesn't match expected type \S+{V:(dp|mp)}"):
        sent_by_step(new_trainer(mesh="4x2"))


@pytest.mark.slow
def test_without_fan_out_every_product_sends_its_gradient(broken, plain_products):
    _, right = step("4x2", "parallel", True)
    without_fan_out(broken)
    t = new_trainer(mesh="4x2")
    wrong = sent_by_step(t)
    assert count(wrong["mp"], in_loop=True)[activation(t)] > count(right["mp"], in_loop=True)[activation(t)]

    def size(by_axis):
        return sum(c.bytes for c in by_axis["mp"] if c.in_loop)

    assert size(wrong) >= 2 * size(right)


@pytest.mark.slow
def test_without_the_dp_cast_every_iteration_reduces_gradients(broken, plain_products):
    without_the_cast_to_dp(broken)
    assert count(sent_by_step(new_trainer(mesh="4x2"))["dp"], in_loop=True)
