"""Fewer key/value heads than shards of the model, against one device's dense model."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint
from shardformer.analysis import memory, verify_exact
from shardformer.errors import UsageError
from shardformer.layout import specs
from shardformer.shards import shared_heads
from tests import asserts, meshes, shared

MODEL = {"layers": 2, "bias": "all", "init_std": None, "norm": "rmsnorm", "qk_norm": "all"}
ADAPTED = {"lora_rank": 3, "lora_targets": "q,k,v", "lora_alpha": 2.0}
CASES = (
    ("1x8", {"kv_heads": 2, "attention": "blocks", "scan": False}),
    ("2x4", {"kv_heads": 2, "sequence_parallel": True, "zero": 3}),
    ("1x4x2", {"kv_heads": 1, "accum": 2}),
    ("2x4", {"kv_heads": 2, "zero": 1} | ADAPTED),
)


@pytest.mark.parametrize(("mesh", "options"), CASES, ids=str)
def test_shared_heads_equal_the_dense_model(mesh, options):
    meshes.assert_equals_one_device(with_steps=options.get("zero") == 3, mesh=mesh, **MODEL | options)


@pytest.mark.slow
def test_compiled_shared_heads_equal_the_dense_model():
    t = shared.trainer(mesh="2x4", kv_heads=2, sequence_parallel=True, zero=3, **MODEL)
    params = shared.drawn(t.config, 0)
    losses, grads = jax.jit(t.model.loss_and_grad)(
        jax.device_put(params, t.model.shardings), shared.batch(), t.dropout_key(0)
    )
    expected = verify_exact.compute_dense(t.config, params, shared.batch(), None)
    grads = shared.on_host(grads)
    for tree in (
        grads,
        expected.gradients,
    ):  # it shifts a query's logits all alike: its gradient is zero but for rounding
        tree["transformer/layers"].pop("k_bias")
    assert abs(float(losses.loss) / float(expected.loss) - 1) < 1e-6
    assert asserts.worst_relative(grads, expected.gradients) < 1e-5


def test_each_shard_reads_the_head_of_its_queries(broken):
    """The twin: heads dealt alternately make another model."""
    broken(
        shared_heads, "_take_columns",
        lambda p, heads: jax.lax.dynamic_slice_in_dim(
            shared_heads.collectives.vary_over_mp(p.astype(np.float32)),
            jax.lax.axis_index("mp") % heads * (p.shape[-1] // heads),
            p.shape[-1] // heads, axis=p.ndim - 1,
        ),
    )  # fmt: skip
    config = shared.tiny(mesh="1x8", kv_heads=2, scan=False, attention="plain", **MODEL)
    wrong = {row.name: row.relative for row in meshes.find_differences(config, with_steps=False) if not row.passes}
    assert wrong["loss"] > 1e-4
    assert wrong["gradient of transformer/layers/k"] > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("1x8", "4x2")])
def test_checkpoint_with_shared_heads_fits_other_meshes(source, target, tmp_path):
    """On 1x8 four shards share a head. On 4x2 each shard has its own head."""
    trainers = [shared.trainer(mesh=mesh, kv_heads=2, zero=0) for mesh in (source, target)]
    assert sorted(t.config.shares_kv_heads for t in trainers) == [False, True]
    states = [trainers[0].init()]
    path = checkpoint.save(tmp_path, 0, states[0], {})
    states.append(checkpoint.restore(path, trainers[1].abstract))
    asserts.assert_bitwise_equal(*(shared.on_host(state.params) for state in states))
    measures = [jax.jit(lambda params, t=t: t.model.evaluate(params, shared.batch())[1].loss) for t in trainers]
    losses = [float(measure(state.params)) for measure, state in zip(measures, states, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    swapped = jax.tree.map(lambda p: p, states[1].params)
    k = swapped["transformer/layers"]["k"]
    swapped["transformer/layers"]["k"] = jax.device_put(np.roll(np.asarray(k), 4, axis=-1), k.sharding)
    assert abs(float(measures[1](swapped)) / losses[0] - 1) > 1e-6  # the twin


def test_only_shared_heads_are_replicated():
    for kv_heads, spec in ((2, P()), (4, P(None, None, "mp")), (None, P(None, None, "mp"))):
        config = shared.tiny(mesh="2x4", kv_heads=kv_heads)
        assert [specs.parameter_spec(f"transformer/layers/{name}", config) for name in "kv"] == [spec] * 2
        assert specs.parameter_spec("transformer/layers/q", config) == P(None, None, "mp")
    assert specs.parameter_spec("transformer/layers/k", shared.tiny(mesh="1x2x2", kv_heads=1, accum=2)) == P("pp")


def test_heads_that_shards_cannot_share_are_rejected():
    with pytest.raises(UsageError, match=r"kv_heads=3 does not divide over mp=4 .*; try mesh=2x1"):
        shared.tiny(mesh="2x4", heads=12, kv_heads=3, d_model=48)


def test_cache_holds_one_head_of_shared_ones_and_only_windows():
    config = shared.tiny(mesh="1x8", layers=3, seq=16, heads=8)
    assert memory.cache_bytes(config) == 2 * 3 * 16 * 4 * 4
    assert memory.cache_bytes(config.replace(kv_heads=2)) == 2 * 3 * 16 * 4 * 4
    assert memory.cache_bytes(config.replace(window=5, window_pattern="wf")) == 2 * (5 + 16 + 5) * 4 * 4
    assert memory.cache_bytes(config.replace(previous_tokens=2), samples=5) == 5 * (2 * 3 * 16 * 4 * 4 + 3 * 4)
