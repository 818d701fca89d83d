"""The seed notebooks' mistakes: each shown with their own formulation, beside ours which does not make it."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.analysis import dense_reference as reference
from shardformer.kernels.attention import AttentionOptions, Plain
from shardformer.shards.embedding import EmbeddingShard
from shardformer.shards.layer import TransformerLayerShard
from shardformer.shards.projection import ProjectionShard
from tests import asserts, meshes, sharded, shared

MP = 4
B, T, D, H, F, V = 2, 6, 8, 4, 32, 16
X = sharded.normal(0, B, T, D)
CONFIG = shared.tiny(mesh=f"1x{MP}", d_model=D, heads=H, seq=T, vocab=V, positions="none", bias="all", layers=1)
LAYER = {
    "layers": {name: 0.3 * sharded.normal(i, D, D) for i, name in enumerate("qkvo")}
    | {"up": 0.3 * sharded.normal(5, D, F), "down": 0.3 * sharded.normal(6, F, D)}
    | {f"{name}_bias": sharded.normal(7 + i, D) for i, name in enumerate(["q", "k", "v", "o", "down"])}
    | {"up_bias": sharded.normal(12, F)},
    "layers/norm": {"scale": 1 + 0.1 * sharded.normal(13, D), "offset": sharded.normal(14, D)},
}
SPECS = sharded.split(LAYER, CONFIG)


def our_layer(x):
    positions = jnp.arange(T)
    return TransformerLayerShard(CONFIG, Plain())(x, AttentionOptions(positions))[0]


def seed_layer(params, x):
    """seed 002's TransformerLayerShard, but for its missing biases; the trunk then did `x = x + l(x)`."""
    p = params["layers"]
    x = seed_norm(params["layers/norm"], x)
    q, k, v = (seed_linear(x, p[n], p[f"{n}_bias"]).reshape(B, T, -1, D // H) for n in "qkv")
    logits = jnp.einsum("bthd,bThd->bhtT", q, k) / np.sqrt(D // H).astype(np.float32)
    logits = logits + np.float32(-1e10) * (1 - np.tril(np.ones((1, 1, T, T), np.float32)))
    values = jnp.einsum("bhtT,bThd->bthd", jax.nn.softmax(logits), v).reshape(B, T, -1)
    attn = seed_linear(values, p["o"], p["o_bias"])
    ff = seed_linear(jax.nn.gelu(seed_linear(x, p["up"], p["up_bias"])), p["down"], p["down_bias"])
    x = x + attn
    x = x + ff
    return lax.psum(x, "mp")


def seed_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * shaped(p["scale"]) + shaped(p["offset"])


def seed_linear(x, w, b):
    return x @ w + shaped(b)


def shaped(vector):
    return vector.reshape(1, 1, -1)


def without(*names):
    """The layer with these parameters zero."""
    return LAYER | {"layers": {n: p * 0 if n in names else p for n, p in LAYER["layers"].items()}}


def dense_layer(params, x):
    h = reference._norm(CONFIG, params["layers/norm"], x)
    attended = reference._attention(CONFIG, params, params["layers"], {}, h)
    return x + attended + reference._feed_forward(params["layers"], h)


def ours(params, mp=MP):
    return sharded.apply(our_layer, CONFIG, params, X, mp=mp)


def seeds(params, mp=MP):
    return X + sharded.on_mesh(seed_layer, (1, mp), (SPECS, P()), P())(params, X)


# 1. The residual inside the sum over shards, and once more in the trunk.


@pytest.mark.slow
def test_residual_times_the_number_of_shards():
    silent = without("o", "o_bias", "down", "down_bias")  # a layer that contributes nothing is the identity
    np.testing.assert_array_equal(ours(silent), X)
    normed = reference._norm(CONFIG, LAYER["layers/norm"], X)
    np.testing.assert_allclose(seeds(silent), X + MP * normed, rtol=1e-5, atol=1e-5)
    expected = dense_layer(LAYER, X)
    assert asserts.relative(ours(LAYER), expected) < 1e-6
    assert asserts.relative(ours(LAYER, mp=1), expected) < 1e-6
    assert asserts.relative(seeds(LAYER), expected) > 0.5
    assert asserts.relative(seeds(LAYER, mp=1), expected) > 0.1  # the trunk's second residual: wrong without a mesh too


# 2. The biases of row-parallel products inside the sum over shards.


def test_row_parallel_bias_times_the_number_of_shards():
    only_bias = without("o", "o_bias", "down")
    bias = LAYER["layers"]["down_bias"]
    np.testing.assert_allclose(ours(only_bias) - X, np.broadcast_to(bias, X.shape), rtol=1e-4, atol=1e-6)
    silent = without("o", "o_bias", "down", "down_bias")
    np.testing.assert_allclose(seeds(only_bias) - seeds(silent), np.broadcast_to(MP * bias, X.shape), rtol=1e-4)


def test_embedding_bias_times_the_number_of_shards():
    table, bias = sharded.normal(0, V, D), sharded.normal(1, D)
    tokens = np.array([[0, 3, 4, 15]], np.int32)

    def seed_embed(table, bias, tokens):
        start = lax.axis_index("mp") * table.shape[0]
        return lax.psum(jax.nn.one_hot(tokens - start, table.shape[0]) @ table + shaped(bias), "mp")

    got = sharded.on_mesh(seed_embed, (1, MP), (P("mp"), P(), P()), P())(table, bias, tokens)
    np.testing.assert_allclose(got, table[tokens] + MP * bias, rtol=1e-5, atol=1e-6)

    def embed(tokens):
        return EmbeddingShard(CONFIG)(tokens, jnp.arange(4))

    np.testing.assert_array_equal(sharded.apply(embed, CONFIG, {"embed": {"tokens": table}}, tokens), table[tokens])


# 3 and 4 train a norm and a split product; the stream of the first layer passes through the second.

NET = {
    "gain": np.ones((2, D), np.float32),
    "up": sharded.normal(1, 2, D, F) / np.float32(np.sqrt(D)),
    "down": sharded.normal(2, 2, F, D) / np.float32(np.sqrt(F)),
}
NET_SPECS = {"gain": P(), "up": P(None, None, "mp"), "down": P(None, "mp", None)}


def net_loss(p, x, total=lambda partial: lax.psum(partial, "mp")):
    for layer in range(2):
        h = seed_norm({"scale": p["gain"][layer], "offset": jnp.zeros(D)}, x)
        x = x + total(jnp.tanh(h @ p["up"][layer]) @ p["down"][layer])
    return (x * X[::-1]).sum()


def net_gradients(check_vma):
    def body(p, x):
        return jax.grad(net_loss)(p, x)

    return sharded.on_mesh(body, (1, MP), (NET_SPECS, P()), NET_SPECS, check_vma=check_vma)(NET, X)


@functools.cache
def dense_net_gradients():
    return jax.grad(functools.partial(net_loss, total=lambda whole: whole))(NET, X)


@functools.cache
def model_gradients(mesh, **overrides):
    """Returns (state, gradients) of the full model's first step."""
    state = shared.trainer(mesh=mesh, **overrides).init()
    return state, shared.update_and_grads(mesh=mesh, **overrides)(state, shared.batch(), np.int32(0))[2]


@functools.cache
def reference_gradients(first=0, last=8):
    params = shared.drawn(shared.tiny(), 0)
    batch = {name: ids[first:last] for name, ids in shared.batch().items()}
    gradient = jax.grad(lambda params, batch: reference.loss(shared.tiny(), params, **batch)[1])
    return exact.run(gradient, params, batch).outputs


@pytest.mark.slow
def test_gradients_through_a_psum_that_transposes_to_a_psum():
    expected, legacy = dense_net_gradients(), net_gradients(check_vma=False)
    assert asserts.relative(legacy["down"][1], MP * expected["down"][1]) < 1e-5  # the last layer: times mp
    assert asserts.relative(legacy["up"][1], MP * expected["up"][1]) < 1e-5
    factors = [np.linalg.norm(legacy["gain"][i]) / np.linalg.norm(expected["gain"][i]) for i in range(2)]
    assert abs(factors[0] / factors[1] - 1) > 0.05  # a factor for each layer: no constant repairs it
    assert asserts.worst_relative(net_gradients(check_vma=True), expected) < 1e-5
    assert asserts.worst_relative(model_gradients("2x4")[1], reference_gradients()) < 1e-5


@pytest.mark.slow
def test_norms_of_each_shard_drift_apart():
    per_shard = {"gain": np.ones((MP, 2, D), np.float32), "up": NET["up"], "down": NET["down"]}
    specs = NET_SPECS | {"gain": P("mp")}
    adam = optax.adam(1e-2)

    def seed_step(p, x):
        grads = jax.grad(lambda p: net_loss(p | {"gain": p["gain"][0]}, x))(p)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = adam.update(grads, adam.init(p), p)
        return optax.apply_updates(p, updates)

    gains = np.asarray(sharded.on_mesh(seed_step, (1, MP), (specs, P()), specs, check_vma=False)(per_shard, X)["gain"])
    assert np.abs(gains[1:] - gains[:1]).max() > 1e-3  # after a single step

    state, grads = model_gradients("2x4")
    for tree in (state.params, grads):
        for module in ("transformer/layers/norm", "transformer/head/norm"):
            for leaf in tree[module].values():
                copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
                assert all(copy.shape == leaf.shape for copy in copies)
                assert all((copy == copies[0]).all() for copy in copies)
    expected = reference_gradients()["transformer/layers/norm"]["scale"]
    assert asserts.relative(grads["transformer/layers/norm"]["scale"], expected) < 1e-5


# 5 and 6. The loss, the z-loss and the accuracy. The seed's own code, on logits.


def on_one_shard(function, *args):
    return jax.tree.map(lambda a: a[0], jax.vmap(function, axis_name="mp", axis_size=1, in_axes=None)(*args))


def seed_loss(logits, targets, z_loss=1):
    """seed 002's ProjectionShard.loss after the projection."""
    logits = logits - lax.pmax(lax.stop_gradient(logits.max(-1, keepdims=True)), "mp")
    gt_onehot = jax.nn.one_hot(targets, logits.shape[-1])
    predicted_logits = lax.psum(jnp.sum(jnp.multiply(gt_onehot, logits), axis=-1), "mp")
    sum_exp_logits = lax.psum(jnp.exp(logits).sum(axis=-1), "mp")
    loss = jnp.log(sum_exp_logits) - predicted_logits
    loss += (1e-4 * jnp.square(jnp.log(sum_exp_logits)) * z_loss).mean()
    return loss.sum(), predicted_logits == 0.0


def our_loss(bias, targets):
    """Our projection of a zero vector: the logits are the bias."""
    head = {"head": {"w": np.zeros((D, V), np.float32), "bias": bias}, "head/norm": zero_norm()}
    zero = np.zeros((1, len(targets), D), np.float32)

    def projection(x, targets):
        return ProjectionShard(CONFIG).loss(x, targets)[1]

    return shared.on_host(sharded.apply(projection, CONFIG, head, zero, targets[None]))


def zero_norm():
    return {"scale": np.zeros(D, np.float32), "offset": np.zeros(D, np.float32)}


@pytest.mark.slow
def test_seed_adds_a_mean_z_loss_to_every_token():
    logits, targets = sharded.normal(0, V), np.arange(8, dtype=np.int32)
    log_z = float(jax.nn.logsumexp(logits))

    def seed(n, z, shift=0):
        return float(on_one_shard(seed_loss, np.tile(logits + np.float32(shift), (n, 1)), targets[:n], z)[0])

    def z_term(n, **kw):
        return seed(n, 1e4, **kw) - seed(n, 0, **kw)

    assert abs(seed(8, 0) - 8 * log_z + logits[:8].sum()) < 1e-3  # a sum over tokens, not nats per token
    assert abs(z_term(8) / z_term(4) - 2) < 1e-4
    assert abs(z_term(8) - 8 * log_z**2) > 1  # and of the wrong number: the largest logit is gone from it,
    assert abs(z_term(8, shift=5) / z_term(8) - 1) < 1e-4  # so that nothing keeps the logits small

    token = our_loss(logits, targets)
    np.testing.assert_allclose(token.log_z_BT, np.full((1, 8), log_z), rtol=1e-5)
    np.testing.assert_allclose(token.nats_BT[0], log_z - logits[:8], rtol=1e-5)
    np.testing.assert_allclose(our_loss(logits + np.float32(5), targets).log_z_BT, token.log_z_BT + 5, rtol=1e-5)


@pytest.mark.slow
def test_loss_and_z_loss_are_means_and_reported_apart():
    params, batch = shared.drawn(shared.tiny(), 0), shared.batch()

    def losses_of(z_loss):
        return meshes.compute_gradients(shared.tiny(mesh="2x4", z_loss=z_loss), batch, params).run.outputs[0]

    losses = losses_of(0.0)
    logits = meshes.compute_logits(shared.tiny(), params, batch["tokens"])
    log_z = np.log(np.exp(logits).sum(-1))
    nats = log_z - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    expected = nats.mean(), (log_z**2).mean(), (logits.argmax(-1) == batch["targets"]).mean()
    np.testing.assert_allclose(losses, expected, rtol=meshes.EXACT)
    np.testing.assert_allclose(losses_of(1e-2), expected, rtol=meshes.EXACT)


@pytest.mark.parametrize("tied", [(0, 1), (3, 4), (2, 15)])  # within a shard, and across shards
def test_accuracy_that_counts_every_tie(tied):
    logits, targets = np.zeros(V, np.float32), np.arange(V, dtype=np.int32)
    logits[list(tied)] = 1
    correct = np.asarray(on_one_shard(seed_loss, np.tile(logits, (V, 1)), targets)[1])
    assert sorted(np.flatnonzero(correct)) == list(tied)  # two right answers to one question
    assert np.flatnonzero(our_loss(logits, targets).correct_BT) == [tied[0]]


# 7. Accumulation.


@pytest.mark.slow
def test_accumulation_that_does_nothing():
    def divide_pytree(pytree, div):
        for pt in jax.tree.leaves(pytree):
            pt = pt / div
        return pytree

    def add_pytrees(pytree1, pytree2):
        for pt1, pt2 in zip(jax.tree.leaves(pytree1), jax.tree.leaves(pytree2), strict=True):
            pt1 = pt1 + pt2
        return pytree1

    quarters = [reference_gradients(i, i + 2) for i in range(0, 8, 2)]
    seeds = divide_pytree(quarters[0], 4)
    for quarter in quarters[1:]:
        seeds = add_pytrees(seeds, divide_pytree(quarter, 4))
    assert asserts.worst_relative(seeds, quarters[0]) == 0  # the first chunk's gradient, as if there were no others
    assert asserts.worst_relative(seeds, reference_gradients()) > 0.1

    # Ours is the mean over examples: four shards of two examples give what the eight give together.
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *quarters)
    assert asserts.worst_relative(mean, reference_gradients()) < meshes.EXACT
    ours = meshes.compute_gradients(shared.tiny(mesh="4x2"), shared.batch(), shared.drawn(shared.tiny(), 0)).gradients
    assert asserts.worst_relative(ours, mean) < meshes.EXACT


# 8. Initialisation.


@pytest.mark.slow
def test_initialisation_with_a_key_for_every_shard():
    linear = hk.transform(lambda x, size: hk.Linear(size, with_bias=False)(x))

    def seed_init(mp):
        keys = jax.random.split(jax.random.key(42), mp)
        of_shard = jax.vmap(lambda key: linear.init(key, jnp.zeros((1, D)), F // mp)["linear"]["w"])
        return np.concatenate(list(of_shard(keys)), axis=-1)

    assert seed_init(1).shape == seed_init(4).shape
    assert asserts.relative(seed_init(4), seed_init(1)) > 0.5  # the same seed is another model on another mesh

    params = [shared.on_host(shared.trainer(mesh=mesh).model.init(42)) for mesh in ("1x1", "2x4")]
    assert asserts.worst_relative(*params) == 0
