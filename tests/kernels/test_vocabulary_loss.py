"""The loss in chunks against a log-softmax over the full vocabulary, both in float64, and its memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.analysis import verify_exact
from shardformer.kernels import vocabulary_loss
from shardformer.kernels.vocabulary_loss import Vocabulary
from tests import asserts, sharded, shared

B, T, D, SIZE, PADDED, Z_LOSS = 4, 7, 8, 13, 16, 0.1  # 7 tokens a row: no chunk divides them; three padded entries
CLOSE = 1e-13
SCALE = 3.0  # of the sum that is differentiated, so that its cotangent is not one
H, BIAS = sharded.normal(0, B, T, D), sharded.normal(2, PADDED)
TARGETS = np.random.RandomState(3).randint(0, SIZE, (B, T)).astype(np.int32)
WEIGHTS = np.random.RandomState(4).uniform(0, 2, (B, T)).astype(np.float32)


def plain(h, table, bias, tied, weights=WEIGHTS, cap=None):
    """By log_softmax of whole logits."""
    logits = (h @ (table.T if tied else table) + (0 if bias is None else bias.reshape(1, 1, -1)))[..., :SIZE]
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), TARGETS[..., None], -1)[..., 0]
    return SCALE * (weights * (nats + Z_LOSS * log_z**2)).sum(), (nats, log_z, logits.argmax(-1) == TARGETS)


def run_exactly(function, *arguments):
    return exact.run(function, *arguments).outputs


def in_chunks(h, table, bias, tied, chunk, mesh=(2, 4), cap=None, run=sharded.on_mesh):
    """((sum, each token's losses), gradients of the sum) on a mesh."""
    vocabulary = Vocabulary(SIZE, "mp", tied, cap)

    def body(h, table, bias, targets, weights):
        def loss(h, table, bias):
            h = lax.pcast(h, "mp", to="varying")
            total, token = vocabulary_loss.loss_in_chunks(h, table, bias, targets, weights, vocabulary, Z_LOSS, chunk)
            return SCALE * lax.psum(total, "dp"), token

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(h, table, bias)

    split = P("mp", None) if tied else P(None, "mp")
    of_bias = None if bias is None else P("mp")
    in_specs, out_specs = (P("dp"), split, of_bias, P("dp"), P("dp")), ((P(), P("dp")), (P("dp"), split, of_bias))
    return run(body, mesh, in_specs, out_specs)(h, table, bias, TARGETS, WEIGHTS)


@pytest.mark.parametrize(("tied", "chunk"), [(False, 5), (True, 3), (True, 100)])
def test_chunks_equal_the_loss_of_all_logits(tied, chunk):
    table, bias = sharded.normal(1, *(PADDED, D) if tied else (D, PADDED)), None if tied else BIAS
    arguments = (0, 1) if tied else (0, 1, 2)
    function = functools.partial(plain, tied=tied)
    differentiate = jax.value_and_grad(function, arguments, has_aux=True)
    (total, (nats, log_z, correct)), expected = run_exactly(differentiate, H, table, bias)
    (got, token), grads = in_chunks(H, table, bias, tied, chunk)
    assert abs(got / total - 1) < CLOSE
    assert asserts.relative(token.nats_BT, nats) < CLOSE
    assert asserts.relative(token.log_z_BT, log_z) < CLOSE
    np.testing.assert_array_equal(token.correct_BT, correct)
    assert max(map(asserts.relative, grads, expected)) < CLOSE

    unweighted = jax.grad(functools.partial(plain, tied=tied, weights=np.ones_like(WEIGHTS)), has_aux=True)
    without = run_exactly(unweighted, H, table, bias)[0]
    assert asserts.relative(grads[0], without) > 0.1  # a gradient that forgot the weights is seen


def test_compiled_chunks_are_the_exact_ones():
    table = sharded.normal(1, D, PADDED)
    got, expected = (
        in_chunks(H, table, BIAS, tied=False, chunk=5, run=run) for run in (sharded.compile_on_mesh, sharded.on_mesh)
    )
    asserts.assert_trees_close(got, expected, 1e-6)


def test_capped_logits_in_chunks_have_their_gradient():
    table = sharded.normal(1, D, PADDED)
    function = functools.partial(plain, tied=False, cap=2.0)
    differentiate = jax.value_and_grad(function, (0, 1, 2), has_aux=True)
    (total, (nats, log_z, _)), expected = run_exactly(differentiate, H, table, BIAS)
    (got, token), grads = in_chunks(H, table, BIAS, tied=False, chunk=5, cap=2.0)
    assert abs(got / total - 1) < CLOSE
    assert asserts.relative(token.nats_BT, nats) < CLOSE
    assert asserts.relative(token.log_z_BT, log_z) < CLOSE
    assert max(map(asserts.relative, grads, expected)) < CLOSE
    assert not np.asarray(grads[1])[:, SIZE:].any()  # padded entries, whose logits are -inf

    without = run_exactly(jax.grad(functools.partial(plain, tied=False), has_aux=True), H, table, BIAS)[0]
    assert asserts.relative(grads[0], without) > 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_gradient_of_a_table_is_summed_in_float32(tied):
    shape, split = ((16, 8), P("mp", None)) if tied else ((8, 16), P(None, "mp"))
    vocabulary = Vocabulary(16, "mp", tied)

    def body(h, table):
        targets, weights = (jnp.zeros((2, 12), dtype) for dtype in (jnp.int32, jnp.float32))
        h = lax.pcast(h, "mp", to="varying")

        def loss(table):
            return vocabulary_loss.loss_in_chunks(h, table, None, targets, weights, vocabulary, 0.1, 6)[0]

        return jax.grad(loss)(table)

    factors = jax.ShapeDtypeStruct((2, 12, 8), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.float32)
    program = str(jax.make_jaxpr(sharded.compile_on_mesh(body, (1, 1), (P(), split), split))(*factors))
    assert re.findall(rf"(\w+)\[{shape[0]},{shape[1]}\]\S* = dot_general", program) == ["f32"]


@pytest.mark.parametrize("chunk", [1, 5, 9, 27, 28, 100])
def test_no_chunk_is_longer_than_asked(chunk):
    parts = vocabulary_loss.split_tokens(H, chunk)
    assert parts.shape[2] <= chunk
    assert parts.shape[0] == -(-B * T // chunk)
    np.testing.assert_array_equal(vocabulary_loss.join_tokens(parts, (B, T)), H)


def test_a_chunk_has_a_token_however_large_the_vocabulary():
    assert vocabulary_loss.tokens_at_once(1 << 40, "tpu") == 1


def test_a_chunk_is_larger_on_an_accelerator():
    """GPT-J's 50,400 entries, in float32: 67 MB of them on a CPU, 537 MB elsewhere."""
    found = {platform: vocabulary_loss.tokens_at_once(50_400, platform) for platform in ("cpu", "gpu", "tpu")}
    assert found == {"cpu": 332, "gpu": 2663, "tpu": 2663}


def test_logits_of_bfloat16_factors_are_summed_in_float32():
    h, table = (sharded.normal(seed, *shape).astype(jnp.bfloat16) for seed, shape in ((5, (2, 3, 256)), (6, (256, 16))))

    def project(h, table):
        return vocabulary_loss.project(h, table, None, Vocabulary(16, "mp", False))

    got = sharded.compile_on_mesh(project, (1, 4), (P(), P(None, "mp")), P(None, None, "mp"))(h, table)
    expected = np.einsum("btd,dv->btv", np.asarray(h, np.float64), np.asarray(table, np.float64))
    assert asserts.relative(got, expected) < 1e-6
    assert asserts.relative(np.asarray(got.astype(jnp.bfloat16), np.float64), expected) > 1e-3


def sums(**overrides):
    model = shared.trainer(**overrides).model
    batch = shared.batch() | {"weights": np.tile(np.arange(16, dtype=np.float32) % 3, (8, 1))}
    params = verify_exact.draw_parameters(shared.tiny(**overrides))
    return np.array(run_exactly(model.sums, params, batch))


def test_evaluation_in_chunks_gives_the_same_sums():
    whole = sums(mesh="1x1")
    np.testing.assert_allclose(sums(mesh="4x2", loss_chunk=5, accum=2), whole, rtol=1e-13)


def temporary_bytes(gradient: bool, **overrides):
    """Returns the temporary memory of a loss over 50,400 entries and 2,048 tokens on one device."""
    config = {"layers": 1, "heads": 4, "d_model": 128, "vocab": 50_400, "seq": 1024, "batch": 2}
    config |= {"attention": "blocks", "mesh": "1x1"}
    t = shared.trainer(**config | overrides)
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct((2, 1024), jnp.float32)}
    key = () if not gradient else (jax.ShapeDtypeStruct((2,), jnp.uint32),)
    function = t.model.loss_and_grad if gradient else t.model.sums
    return jax.jit(function).lower(t.model.abstract, batch, *key).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [True, False])
def test_chunks_keep_no_array_of_tokens_by_vocabulary(gradient):
    logits = 4 * 2048 * 50_400
    assert temporary_bytes(gradient) < logits
    assert temporary_bytes(gradient, loss_chunk=2048) > logits
