"""A context that is split over cp: the numbers of one device in training and evaluation, with all that rows carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint, exact
from shardformer.analysis import memory, pictures, temporaries, traced, verify_exact
from shardformer.layout import mesh, resolve
from shardformer.model import Model
from shardformer.parallel import context
from shardformer.parallel.replicas import Replicated
from shardformer.parallel.ring_attention import Ring
from shardformer.shards import Dropout
from tests import asserts, meshes, shared, tiers

LOSS, GRADIENT = 1e-6, 1e-5
# Rows carry documents, whose positions restart, and weights; masks are drawn by position; heads share keys.
FEATURES = {"positions": "learned", "documents": "masked", "dropout": 0.1, "kv_heads": 4, "layers": 2}
# Each way with dp, mp, pp, ZeRO, sequence_parallel, remat and accum; cp of 2 and 4, and of 8 in test_ring_attention.py.
MESHES = (
    ("dp2.cp2.mp2", {"context_parallel": "gather", "zero": 3, "sequence_parallel": True, "remat": "dots"}),
    ("cp4.pp2", {"context_parallel": "ring", "zero": 1, "accum": 2, "attention": "blocks"}),
    ("dp2.cp2.mp2", {"context_parallel": "ring", "zero": 3, "sequence_parallel": True, "remat": "full"}),
)
KEY = jax.random.key_data(jax.random.key(3))
ONES = np.ones((8, 16, 32), np.float32)


def batch(seed=0):
    draw = np.random.RandomState(seed)
    documents = np.cumsum(draw.rand(8, 16) < 0.2, axis=1).astype(np.int32)
    weights = (draw.rand(8, 16) < np.linspace(0.2, 1, 8)[:, None]).astype(np.float32)
    return shared.batch(seed) | {"documents": documents, "weights": weights}


@pytest.mark.parametrize(("name", "options"), MESHES)
def test_split_context_equals_one_device(name, options):
    meshes.assert_equals_one_device(with_steps=(name, options) == MESHES[0], mesh=name, **FEATURES, **options)


@pytest.mark.parametrize(("name", "options"), MESHES)
def test_evaluation_of_a_split_context_has_the_sums_of_one_device(name, options):
    meshes.assert_equal_sums(shared.tiny(mesh=name, **FEATURES, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [tiers.at_night(MESHES[0]), MESHES[1]])  # the two algorithms
def test_compiled_context_equals_the_exact_device(name, options):
    model, params = shared.trainer(mesh=name, **FEATURES, **options).model, shared.drawn(shared.tiny(**FEATURES), 0)
    params_on_mesh, key = jax.device_put(params, model.shardings), np.asarray(KEY)
    losses, gradients = jax.jit(model.loss_and_grad)(params_on_mesh, batch(), key)
    single = traced.make_trainer(shared.tiny(mesh="1x1", **FEATURES))
    expected = verify_exact.compute_gradients(single, params, batch(), key)
    assert abs(losses.loss / expected.loss - 1) <= LOSS
    asserts.assert_trees_close(shared.on_host(gradients), expected.gradients, GRADIENT)
    sums = exact.run(single.model.sums, params, batch()).outputs
    np.testing.assert_allclose(jax.jit(model.sums)(params_on_mesh, batch()), sums, rtol=GRADIENT)


def over_context(body, in_specs, out_specs):
    """Returns a function in shard view on a mesh of dp=2 and cp=4."""
    devices = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "cp"))
    return jax.jit(jax.shard_map(body, mesh=devices, in_specs=in_specs, out_specs=out_specs))


@pytest.mark.parametrize("by_global_position", [True, False])
def test_masks_are_bitwise_those_of_complete_rows(by_global_position):
    def draw(x, position_T):
        examples = lax.axis_index("dp") * 4 + jnp.arange(4)
        return Dropout(0.3, jax.random.wrap_key_data(KEY), examples, position_T=position_T).at(2)(x)

    def draw_own(x):
        ring = Ring(block=2)
        return draw(ring.take_tokens(x), ring.positions(4) if by_global_position else None)

    whole = over_context(lambda x: draw(x, None), P("dp"), P("dp"))(ONES)
    found = over_context(draw_own, P("dp"), P("dp", "cp"))(ONES)
    chunks = np.asarray(found).reshape(8, 4, 2, 2, 32)  # shard s holds chunk s and chunk 7 - s
    in_order = np.concatenate([chunks[:, :, 0].reshape(8, 8, 32), chunks[:, ::-1, 1].reshape(8, 8, 32)], axis=1)
    assert np.array_equal(in_order, whole) == by_global_position


@pytest.mark.parametrize("average", [Replicated.mean, lambda self, grads: jax.tree.map(add_up, grads)])
def test_gradients_are_means_over_dp_and_cp(average):
    replicas = resolve(shared.tiny(mesh="dp2.cp4")).replicas
    w, x = np.float32(3), np.arange(16, dtype=np.float32).reshape(2, 8)

    def body(w, x):
        tokens, local = Ring().take_tokens(x), replicas.make_local({"module": {"w": w}})
        grads = jax.grad(lambda p: jnp.square(p["module"]["w"] * tokens).mean())(local)
        return average(replicas, grads)["module"]["w"]

    found = float(over_context(body, (P(), P("dp")), P())(w, x))
    assert (found == 2 * 3 * np.square(x).mean()) == (average is Replicated.mean)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_every_shard_has_the_same_causal_work(cp):
    work = {np.sum(1 + np.asarray(context.positions(shard, cp, 64))) for shard in range(cp)}  # pairs of tokens
    assert work == {64 * 65 // 2 // cp}
    plain = [np.sum(1 + np.arange(64).reshape(cp, -1)[shard]) for shard in range(cp)]
    assert max(plain) > 1.4 * min(plain)


def measure_temporaries(name: str, compiled: bool) -> int:
    """Returns the bytes of activations of a long row on one device."""
    config = shared.tiny(mesh=name, layers=6, seq=512, d_model=64, batch=1, attention="blocks")
    gradients = memory.predict_bytes(config).gradients
    if not compiled:
        return temporaries.estimate_temporaries(resolve(config)) - gradients
    m, tokens = Model.on(config, mesh.make(config)), jax.ShapeDtypeStruct((1, 512), np.int32)
    step = jax.jit(m.loss_and_grad).lower(m.abstract, {"tokens": tokens, "targets": tokens}, KEY).compile()
    return step.memory_analysis().temp_size_in_bytes - gradients


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_activations_fall_to_their_share(compiled):
    assert measure_temporaries("cp4", compiled) < 1.05 * measure_temporaries("1x1", compiled) / 4


def add_up(g):
    return lax.psum(g, ("dp", "cp"))


@pytest.mark.slow
def test_a_checkpoint_does_not_know_cp(tmp_path):
    split, plain = (shared.trainer(mesh=name, zero=1) for name in ("dp2.cp4", "4x2"))
    state = jax.device_put(shared.on_host(shared.initial_state(mesh="4x2", zero=1)), split.shardings)
    held = state.params["transformer/layers"]["q"].addressable_shards[0].data.nbytes
    assert held == state.params["transformer/layers"]["q"].nbytes // 8  # ZeRO splits over dp and cp
    path = checkpoint.save(tmp_path, 1, state, {})
    restored = checkpoint.restore(path, plain.abstract)
    asserts.assert_bitwise_equal(shared.on_host(restored.params), shared.on_host(state.params))
    assert restored.params["transformer/layers"]["q"].sharding == plain.shardings.params["transformer/layers"]["q"]


@pytest.mark.parametrize("cp", [2, 4])
def test_every_pair_of_chunks_has_its_turn(cp):
    turns = pictures.turns_of_chunks(cp)
    assert set(turns) == {(row, column) for row in range(2 * cp) for column in range(2 * cp) if column <= row}
    for shard in range(cp):
        own = [turn for held, turn in turns.values() if held == shard]
        assert [own.count(turn) for turn in range(cp)] == [3] + [2] * (cp - 1)  # two of the three are half masked
