"""Data parallelism: gradients scattered in stages, and the collectives of zero=1."""

import collections
import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer.analysis import verify_exact
from shardformer.analysis.program_collectives import parse_collectives
from shardformer.layout import mesh, resolve
from shardformer.model import Loss
from shardformer.parallel.scattering import Scattering
from shardformer.training.trainer import Trainer
from tests import asserts, sharded, shared
from tests.surroundings import change_pieces


@pytest.mark.parametrize(("by_layer", "rows"), [(False, (8, 8)), (True, (2, 8))])
def test_single_forward_passes_gather_layer_by_layer(by_layer, rows):
    """The numbers of rows that a shard holds after `make_local` and in a layer, of 8 rows over 4 shards."""
    name, leaf = "transformer/layers", sharded.normal(0, 3, 8, 4)
    replicas = resolve(shared.tiny(mesh="4x1", zero=1, dtype="float32")).replicas.with_dimensions({name: {"q": 1}})
    replicas = replicas.for_forward_pass() if by_layer else replicas
    seen = []

    def body(leaf):
        stored = replicas.make_local({name: {"q": leaf}})
        layer = replicas.gather_layer({name: {"q": stored[name]["q"][0]}})
        seen.extend((stored[name]["q"].shape[1], layer[name]["q"].shape[0]))
        return layer[name]["q"][None]

    got = sharded.on_mesh(body, (4, 1), (P(None, "dp"),), P("dp"))(leaf)
    assert tuple(seen) == rows
    np.testing.assert_array_equal(got[3], leaf[0])


def new_trainer(torus=None, **overrides):
    """Returns a trainer on CPU devices, whose dp follows these torus dimensions if given."""
    config = shared.tiny(**overrides)
    return Trainer(config, mesh.make(config), resolve(config, torus=torus) if torus else None)


def loss_and_grads(t):
    """Returns loss and gradients of a made-up batch, on parameters with non-trivial norms and biases."""
    leaves = [0.3 * sharded.normal(i, *leaf.shape) for i, leaf in enumerate(jax.tree.leaves(t.model.shapes))]
    params = jax.device_put(jax.tree.unflatten(jax.tree.structure(t.model.shapes), leaves), t.model.shardings)
    return shared.on_host(jax.jit(t.model.loss_and_grad)(params, shared.batch(), t.dropout_key(0)))


def compute_exactly(t):
    """Returns the same in float64."""
    params = verify_exact.draw_parameters(t.config)
    return verify_exact.compute_gradients(t, params, shared.batch(), np.zeros(2, np.uint32))


@functools.cache
def compute_plainly(**overrides):
    return compute_exactly(new_trainer(**overrides))


@functools.cache
def float32_gradients():
    return loss_and_grads(new_trainer(mesh="8x1", zero=3))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(8,), (2, 4)])
def test_bfloat16_scatters_change_gradients_by_half_a_percent(stages):
    """In one stage and two. The first digits differ, so that bfloat16 was sent; vectors are sent in float32."""
    plain = float32_gradients()
    rounded = loss_and_grads(new_trainer(stages, mesh="8x1", zero=3, grad_dtype="bfloat16"))
    for module, name in (("layers", "q"), ("head", "w"), ("embed", "tokens")):
        got, expected = (gradients[1][f"transformer/{module}"][name] for gradients in (rounded, plain))
        assert 1e-4 < asserts.relative(got, expected) < 5e-3
    got, expected = (gradients[1]["transformer/head"]["bias"] for gradients in (rounded, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("stage", "shape", "stages"), [(3, "8x1", (2, 2, 2)), (1, "4x2", (2, 2))])
def test_staged_step_has_the_gradients_of_a_plain_step(shape, stages, stage):
    staged = compute_exactly(new_trainer(stages, mesh=shape, zero=stage))
    asserts.assert_gradients_equal(staged, compute_plainly(mesh=shape))


def test_exchanging_step_has_the_gradients_of_a_plain_step(monkeypatch):
    """Gradients in pieces of 8 columns, as a TPU exchanges larger ones."""
    change_pieces(monkeypatch, 64, lanes=8)
    layout = resolve(shared.tiny(mesh="8x1", zero=3))
    scattering = Scattering((2, 4), exchange=True, in_pieces=True)
    layout = dataclasses.replace(layout, replicas=dataclasses.replace(layout.replicas, scattering=scattering))
    exchanging = Trainer(layout.config, mesh.make(layout.config), layout)
    got = compute_exactly(exchanging)
    asserts.assert_gradients_equal(got, compute_plainly(mesh="8x1"))
    exchanges = [sent for sent in got.run.wire if sent.operation == "all-to-all"]
    assert sum(sent.times for sent in exchanges) > 6  # the matrices of a layer, in pieces


@pytest.mark.slow
def test_compiled_staged_step_has_the_gradients_of_a_plain_step():
    plain, staged = (loss_and_grads(new_trainer(stages, mesh="8x1", zero=3)) for stages in (None, (2, 2, 2)))
    assert asserts.worst_relative(staged, plain) < 1e-6


@pytest.mark.slow
def test_stages_exchange_within_rows_and_columns():
    """In compiled HLO: a gradient shrinks with each stage, and no group spans all of dp."""
    t = new_trainer((4, 2), mesh="8x1", zero=1)
    hlo = jax.jit(t.model.loss_and_grad).lower(t.model.abstract, shared.batch(), t.dropout_key(0)).compile().as_text()
    found = [c for c in parse_collectives(hlo) if c.operation == "reduce-scatter"]
    sent = collections.Counter()
    for c in found:
        sent[len(c.groups[0])] += c.bytes
    parameters = 4 * sum(leaf.size for leaf in jax.tree.leaves(t.model.shapes))
    assert sent == {4: parameters // 4, 2: parameters // 8}


# Stage 1 gathers everything once, in the type that it multiplies in.


def gathered(t):
    """Counts gathers and scatters by shape in the lowered step: XLA's CPU compiler widens bfloat16."""
    text = t.lower(t.abstract, t.abstract_batch)[0].as_text()
    found = re.findall(r'"stablehlo.(all_gather|reduce_scatter)".*?-> tensor<([^>]*)>', text, re.DOTALL)
    return [collections.Counter(what for kind, what in found if kind == k) for k in ("all_gather", "reduce_scatter")]


def names(t, dtype_of):
    """Counts the parameters by their names in lowered text."""
    leaves = itertools.chain.from_iterable(leaves.items() for leaves in t.model.shapes.values())
    return collections.Counter("x".join([*map(str, leaf.shape), dtype_of(name)]) for name, leaf in leaves)


def test_stage_1_gathers_in_dtype_and_scatters_in_float32():
    t = new_trainer(mesh="8x1", zero=1, dtype="bfloat16", accum=1)

    def wide(name):
        return "bf16" if name in ("q", "k", "v", "o", "up", "down", "w") else "f32"

    gathers, scatters = gathered(t)
    assert gathers == names(t, wide)
    assert sum(scatters.values()) == len(jax.tree.leaves(t.model.shapes))
    assert all(name.endswith("f32") for name in scatters)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_stage_1_sends_no_more_with_microbatches(scan):
    whole, cut = (gathered(new_trainer(mesh="4x1", batch=16, zero=1, accum=accum, scan=scan)) for accum in (1, 4))
    assert whole == cut


@pytest.mark.slow
def test_stage_1_gathers_no_update():
    """The twin: parameters that are whole in float32 have to be gathered after the update, which XLA does by itself."""
    t = new_trainer(mesh="8x1", zero=1, dtype="bfloat16")

    def update(state, grads):
        return t.update.apply(state, Loss(*[np.float32(1)] * 3), grads, np.int32(0))[0]

    grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=leaf.sharding),
                         t.model.abstract)  # fmt: skip
    whole = jax.tree.map(lambda leaf: t.model.sharding(P()), t.shardings.params)
    sent = []
    for shardings in (t.shardings, t.shardings._replace(params=whole)):
        hlo = jax.jit(update, out_shardings=shardings).lower(t.abstract, grads).compile().as_text()
        sent.append(sum(c.bytes for c in parse_collectives(hlo) if c.operation == "all-gather"))
    assert sent[0] == 0
    assert sent[1] == 4 * sum(leaf.size for leaf in jax.tree.leaves(t.model.shapes))
