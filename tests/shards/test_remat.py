"""Recomputation in the backward pass: the same numbers in less memory, and no more work than remat= asks for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.analysis import verify_exact
from shardformer.kernels import blockwise_attention, linear, remat
from shardformer.kernels.attention import ATTENDED, ATTENTION_WEIGHTS
from shardformer.layout import mesh, resolve
from shardformer.training.trainer import Trainer
from tests import asserts, shared

KINDS = ("full", "dots", "attention", "none")  # of the least memory first
BATCH = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("tokens", "targets")}
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def make_trainer(**overrides):
    """Returns a trainer, and the arguments of its gradients."""
    t = shared.trainer(dropout=0.1, layers=2, **overrides)
    return t, verify_exact.draw_parameters(t.config), shared.batch(), np.zeros(2, np.uint32)


@functools.cache
def compute_gradients(**overrides):
    return verify_exact.compute_gradients(*make_trainer(**overrides))


@pytest.mark.parametrize(
    ("mesh", "remat", "attention", "zero"),
    [("4x2", "dots", "blocks", 3), ("2x4", "attention", "plain", 1)],
)
def test_remat_does_not_change_the_numbers(mesh, remat, attention, zero):
    got = compute_gradients(mesh=mesh, remat=remat, attention=attention, zero=zero)
    asserts.assert_gradients_equal(got, compute_gradients(mesh="1x1"))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "remat", "attention"), [("2x4", "dots", "plain"), ("8x1", "attention", "blocks")])
def test_compiled_remat_does_not_change_the_numbers(mesh, remat, attention):
    arguments = make_trainer(mesh=mesh, remat=remat, attention=attention)
    asserts.assert_compiled_gradients_equal(*arguments, compute_gradients(mesh="1x1"))


def temporary_bytes(remat, **overrides):
    shapes = {name: jax.ShapeDtypeStruct((2, 256), jnp.int32) for name in ("tokens", "targets")}
    sizes = {"mesh": "1x1", "layers": 4, "heads": 4, "seq": 256, "batch": 2, "attention": "plain"}
    t = shared.trainer(remat=remat, **sizes | overrides)
    compiled = jax.jit(t.model.loss_and_grad).lower(t.model.abstract, shapes, KEY).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.nightly
def test_each_kind_of_remat_takes_less_memory_than_the_next():
    took = [temporary_bytes(kind) for kind in KINDS]
    assert took == sorted(took)
    weights = 4 * 4 * 2 * 4 * 256 * 256 * 5 // 8  # of all layers: bytes, layers, rows, heads, pairs of tokens in parts
    assert took[-1] - took[2] > 0.9 * weights  # attention's weights and no less is what `attention` does without
    assert took[1] < 0.9 * took[2]


def count_loops(**overrides):
    """In the lowered gradient of attention in blocks, which is made of loops; the layers are unrolled.

    A traced gradient may have loops whose results nothing reads: those of JAX_REMAT3 have, which JAX drops here.
    """
    t = shared.trainer(mesh="1x1", layers=1, scan=False, attention="blocks", **overrides)
    return jax.jit(t.model.loss_and_grad).lower(t.model.abstract, BATCH, KEY).as_text().count("stablehlo.while")


def test_only_full_remat_runs_blocks_again(broken):
    once = count_loops(remat="none")
    assert count_loops(remat="dots") == count_loops(remat="attention") == once
    assert count_loops(remat="full") > once
    broken(blockwise_attention, "checkpoint_name", lambda x, name: x)
    assert count_loops(remat="dots", lr=1.0) > once  # another configuration: the first keeps what it has traced


PRODUCTS = {remat.PRODUCT, ATTENDED, remat.SUM}


@pytest.mark.parametrize(
    ("kept", "overrides"),
    [
        ([None], {"remat": "full"}),
        ([PRODUCTS], {"remat": "dots"}),
        ([], {"remat": "none"}),
        ([PRODUCTS | {ATTENTION_WEIGHTS}], {"remat": "none", "zero": 3}),
        ([PRODUCTS | {ATTENTION_WEIGHTS}], {"remat": "none", "mesh": "2x2x2", "accum": 2}),
        ([PRODUCTS], {"remat": "attention", "zero": 3}),
        ([], {"remat": "attention"}),
    ],
)
def test_layer_keeps_what_remat_names(monkeypatch, kept, overrides):
    policies = []
    monkeypatch.setattr(
        jax, "checkpoint", lambda layer, policy=None, prevent_cse=True: policies.append(policy) or layer
    )
    monkeypatch.setattr(remat, "_keep", set)
    layout = resolve(shared.tiny(**overrides))
    layout.remat.recompute_layer(abs, in_loop=True)
    assert policies == kept
    layout.remat.recompute_attention(abs)
    assert policies[len(kept) :] == ([{ATTENDED}] if overrides["remat"] == "attention" else [])


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("remat", "layers"),
    [("dots", 3), pytest.param("full", 3, marks=pytest.mark.slow), pytest.param("dots", 1, marks=pytest.mark.slow)],
)
def test_only_layers_outside_of_loops_have_barriers(monkeypatch, remat, layers, scan):
    """A barrier for each layer; beside those of the CPU's products."""
    monkeypatch.setattr(linear, "_transposed_product_on_cpu", lambda x, dy: x.T @ dy)
    config = shared.tiny(remat=remat, layers=layers, scan=scan)
    t = Trainer(config, mesh.make(config))
    text = jax.jit(t.model.loss_and_grad).lower(t.model.abstract, shared.batch(), t.dropout_key(0)).as_text()
    assert (text.count("stablehlo.optimization_barrier") >= layers) is (not scan)
