"""The projection's loss, log-partition and accuracy against log_softmax on gathered logits, in float64."""

import haiku as hk
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.devices.chips import Hardware
from shardformer.kernels import vocabulary_loss
from shardformer.layout import resolve
from shardformer.layout.float_weights import FloatWeights
from shardformer.shards.projection import ProjectionShard
from tests import asserts, sharded, shared
from tests.surroundings import before_call

V, PADDED, D = 13, 16, 8  # four shards of 4: the last one has a single real entry
X = sharded.normal(0, 2, 5, D)
TARGETS = np.array([[0, 3, 4, 7, 8], [11, 12, 12, 5, 1]], np.int32)
ONES = np.ones(D, np.float32)


def settings(**overrides):
    return shared.tiny(d_model=D, heads=4, vocab=V, mesh="1x4", norm="rmsnorm", **overrides)


def parameters(w=None, bias=None):
    w = sharded.normal(1, D, PADDED) if w is None else w
    bias = sharded.normal(2, PADDED) if bias is None else bias
    return {"head": {"w": w, "bias": bias}, "head/norm": {"scale": ONES, "offset": ONES}}


def dense_logits(x, p):
    """Takes arrays of NumPy in float64, or of JAX."""
    h = x / ((x**2).mean(-1, keepdims=True) + np.float32(1e-5)) ** 0.5
    h = h * p["head/norm"]["scale"].reshape(1, 1, -1) + p["head/norm"]["offset"].reshape(1, 1, -1)
    return (h @ p["head"]["w"] + p["head"]["bias"].reshape(1, 1, -1))[..., :V]


def logits_in_numpy(p):
    return dense_logits(np.float64(X), jax.tree.map(np.float64, p))


def losses(p, targets=TARGETS, x=X, mp=4, chunk=None, run=sharded.on_mesh):
    def measure(x, t):
        return ProjectionShard(settings(), chunk).loss(x, t)[1]

    return sharded.apply(measure, settings(), p, x, targets, mp=mp, run=run)


@pytest.mark.parametrize("scale", [1, 1000])
def test_loss_and_log_partition(scale):
    p = parameters(w=sharded.normal(1, D, PADDED) * np.float32(scale))
    token, logits = losses(p), logits_in_numpy(p)
    log_z = np.logaddexp.reduce(logits, axis=-1)
    np.testing.assert_allclose(token.log_z_BT, log_z, rtol=1e-12)
    nats = log_z - np.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    np.testing.assert_allclose(token.nats_BT, nats, rtol=1e-12, atol=1e-15 * np.abs(logits).max())
    np.testing.assert_array_equal(token.correct_BT, logits.argmax(-1) == TARGETS)


@pytest.mark.parametrize("chunk", [None, 3])
def test_compiled_losses_are_the_exact_ones(chunk):
    compiled, token = (losses(parameters(), chunk=chunk, run=run) for run in (sharded.compile_on_mesh, sharded.on_mesh))
    asserts.assert_trees_close(compiled, token, 1e-6)


def test_most_likely_token_is_correct_on_any_shard():
    logits = logits_in_numpy(parameters())
    assert len(set(logits.argmax(-1).ravel() // 4)) > 1  # on more than one shard
    assert losses(parameters(), logits.argmax(-1).astype(np.int32)).correct_BT.all()
    assert not losses(parameters(), logits.argmin(-1).astype(np.int32)).correct_BT.any()


@pytest.mark.parametrize("chunk", [None, 3])
def test_z_loss_is_part_of_the_objective(chunk):
    config = settings(z_loss=0.25)
    objective, token = sharded.apply(
        lambda x, t: ProjectionShard(config, chunk).loss(x, t), config, parameters(), X, TARGETS
    )
    np.testing.assert_allclose(objective, np.mean(token.nats_BT + 0.25 * np.square(token.log_z_BT)), rtol=1e-14)
    assert abs(float(objective) / float(token.nats_BT.mean()) - 1) > 0.1


@pytest.mark.parametrize(("chunk", "chunks"), [(None, []), (10, []), (9, [9])])
def test_only_more_tokens_than_a_chunk_go_in_chunks(monkeypatch, chunk, chunks):
    """There are 10 tokens."""
    lengths = []
    before_call(monkeypatch, FloatWeights, "loss_in_chunks", lambda *args: lengths.append(args[-1]))
    losses(parameters(), chunk=chunk)
    assert lengths == chunks


def test_layout_chooses_the_chunk_of_a_shards_vocabulary():
    """4 of 16 entries are on a shard, 4 bytes each."""
    by_platform = {platform: resolve(settings(), Hardware(platform)).loss_chunk for platform in ("cpu", "gpu", "tpu")}
    fitting = {platform: size // (4 * 4) for platform, size in vocabulary_loss.LOGITS_AT_ONCE.items()}
    assert by_platform == fitting
    assert resolve(settings(loss_chunk=3)).loss_chunk == 3


@pytest.mark.parametrize("tied", [(0, 5, 11), (5, 6, 9), (9, 12), tuple(range(V))])
def test_lowest_index_wins_a_tie(tied):
    bias = np.full(PADDED, -1, np.float32)
    bias[list(tied)] = 1
    every = np.arange(V, dtype=np.int32)[None]
    token = losses(parameters(np.zeros((D, PADDED), np.float32), bias), every, np.zeros((1, V, D), np.float32))
    np.testing.assert_array_equal(token.correct_BT[0], every[0] == tied[0])


def test_padded_entries_are_impossible_and_get_no_gradient():
    bias = np.where(np.arange(PADDED) < V, -50, 50).astype(np.float32)  # as attractive as they can be
    p = parameters(bias=bias)

    def call(x):
        return ProjectionShard(settings()).logits(x)

    logits = np.asarray(sharded.apply(call, settings(), p, X, out_specs=P(None, None, "mp")))
    assert logits.shape == (2, 5, PADDED)
    assert (logits[..., V:] == -np.inf).all()
    np.testing.assert_allclose(logits[..., :V], logits_in_numpy(p), rtol=1e-12)
    np.testing.assert_array_equal(losses(p).correct_BT, logits_in_numpy(p).argmax(-1) == TARGETS)

    def mean(x, t):
        return ProjectionShard(settings()).loss(x, t)[0]

    grads = sharded.gradient(mean, settings(), p, X, TARGETS)["head"]
    np.testing.assert_array_equal(grads["w"][:, V:], 0)
    np.testing.assert_array_equal(grads["bias"][V:], 0)
    assert (grads["w"][:, :V] != 0).all()
    expected = exact.run(jax.grad(dense_loss), p, X).outputs["head"]
    assert asserts.relative(grads["w"], expected["w"]) < 1e-13
    assert asserts.relative(grads["bias"], expected["bias"]) < 1e-13


def dense_loss(p, x):
    out = jax.nn.log_softmax(dense_logits(x, p))
    return -jax.numpy.take_along_axis(out, TARGETS[..., None], -1).mean()


def test_tied_head_reads_the_embedding():
    table = sharded.normal(1, PADDED, D)
    config = settings(tied=True, bias="none")
    x = np.float64(X)
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(1e-5))

    head = hk.without_apply_rng(hk.transform(lambda table, x: ProjectionShard(config).logits(x, table)))

    def tied(table, x):
        return head.apply({"head/norm": {"scale": ONES}}, table, x)

    got = sharded.on_mesh(tied, (1, 4), (P("mp", None), P()), P(None, None, "mp"))(table, X)
    np.testing.assert_allclose(got[..., :V], h @ table[:V].T, rtol=1e-12)
    assert (np.asarray(got[..., V:]) == -np.inf).all()


@pytest.mark.parametrize("scale", [0.4, 3.0])
def test_scale_multiplies_the_bias_too(scale):
    p, config = parameters(), settings(logits_scale=scale)

    def measure(x, t):
        return ProjectionShard(config).loss(x, t)[1]

    token = sharded.apply(measure, config, p, X, TARGETS)
    np.testing.assert_allclose(token.log_z_BT, jax.nn.logsumexp(scale * dense_logits(X, p), axis=-1), rtol=1e-5)
