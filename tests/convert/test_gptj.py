"""GPT-J's checkpoints load with the meaning that its code gives them, and nothing is lost in a round trip."""

import contextlib
import dataclasses
import functools
import gc
import json
import tracemalloc

import jax
import numpy as np
import pytest

from shardformer.config.model_keys import ModelKeys
from shardformer.convert import gptj, gptj_settings, gptj_state, leaves, runs, shard_files
from shardformer.convert.leaves import Moments, State
from shardformer.data.vocabulary import TokenIds
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.training.run_folder import Run
from tests import asserts, shared

CASES = ("rotary-1", "rotary-2", "rotary-4", "rotary-8", "t5-4", "fixed-2")
SAME, DIFFERENT = 1e-5, 1e-2


def read(folder):
    config, _ = gptj_settings.read_config(folder / "config.json")
    return on_host(gptj_state.open_state(folder, config))


def on_host(state):
    """With whole arrays for what is read on demand."""
    return jax.tree.map(np.asarray, state)


@functools.cache
def model(config, shape):
    config = config.replace(mesh=shape, dtype="float32", remat="none", batch=4)
    return Model.on(config, mesh.make(config))


def distance(folder, shape="1x1") -> float:
    """Returns the largest difference of our logits from GPT-J's."""
    config, _ = gptj_settings.read_config(folder / "config.json")
    ours, golden = model(config, shape), np.load(folder / "golden.npz")
    params = jax.device_put(runs.nest(ours.shapes, read(folder).params), ours.shardings)
    tokens = np.repeat(golden["tokens"][:, :-1].astype(np.int32), ours.config.parallel.dp, axis=0)
    return float(np.abs(np.asarray(jax.jit(Decoder(ours).logits)(params, tokens))[0] - golden["logits"][0]).max())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_gptj(recorded, case):
    assert distance(recorded / case) <= SAME


def test_logits_are_the_same_on_a_mesh(recorded):
    assert distance(recorded / "rotary-2", "2x4") <= SAME


def _swapped(one, other):
    exchange = {f"transformer/layers/{one}": other, f"transformer/layers/{other}": one}

    def rename(rule):
        name = exchange.get(rule.ours)
        return rule._replace(ours=f"transformer/layers/{name}") if name else rule

    return lambda rules: tuple(map(rename, rules))


def _joined(ending, join):
    def other(rule):
        shards = type("Other", (type(rule.shards),), {"join": lambda self, parts, whole: join(parts, whole)})
        return rule._replace(shards=shards(rule.shards.axis) if rule.shards == gptj.ROWS else shards())

    return lambda rules: tuple(other(rule) if rule.theirs.endswith(ending) else rule for rule in rules)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "change"),
    [
        ("LAYER_RULES", _swapped("q", "k")),
        ("LAYER_RULES", _swapped("k", "v")),
        ("LAYER_RULES", _joined("linear_3/w", lambda parts, whole: gptj.ROWS.join(parts[::-1], whole))),
        ("LAYER_RULES", _joined("linear_4/b", lambda parts, whole: gptj.ROWS.join(parts[::-1], whole))),
        ("LAYER_RULES", _joined("linear_5/b", gptj.FIRST.join)),
        ("LAYER_RULES", _joined("norm/scale", gptj.SUMMED.join)),
        ("MODEL_RULES", _joined("norm/offset", gptj.SUMMED.join)),
        ("MODEL_RULES", _joined("embedding_shard/~/linear/b", gptj.FIRST.join)),
    ],
)
def test_any_other_rule_shows_in_the_logits(recorded, monkeypatch, rules, change):
    monkeypatch.setattr(gptj, rules, change(getattr(gptj, rules)))
    assert distance(recorded / "rotary-4") > DIFFERENT


def test_tree_order_of_many_layers(recorded):
    """Layer 10 comes before layer 2."""
    config, _ = gptj_settings.read_config(recorded / "t5-4" / "config.json")
    names = [leaf.name for leaf in gptj.list_leaves(config.replace(layers=12))]
    assert names == json.loads((recorded / "names_of_12_layers.json").read_text())
    assert names.index(f"{gptj.ROOT}layer_10/~/linear/w") < names.index(f"{gptj.ROOT}layer_2/~/linear/w")


@pytest.fixture(scope="module")
def gradients(recorded):
    """Ours, at the parameters of the checkpoint whose moments are of one step, up to its clipping."""
    folder = recorded / "fixed-2"
    config, _ = gptj_settings.read_config(folder / "config.json")
    ours, tokens = model(config.replace(z_loss=0.0), "1x1"), np.load(folder / "golden.npz")["tokens"].astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    params = runs.nest(ours.shapes, read(folder).params)
    _, grads = jax.jit(lambda params: ours.loss_and_grad(params, batch, None))(params)
    return runs.flatten(grads)


def _apart(moments: Moments, gradients) -> float:
    """The largest relative distance of a leaf of mu or nu from what one clipped step makes of our gradients."""
    name = "transformer/layers/q"
    clip = np.linalg.norm(moments.mu[name]) / np.linalg.norm(0.1 * gradients[name])
    mu = {name: asserts.relative(moments.mu[name], 0.1 * clip * grad) for name, grad in gradients.items()}
    nu = {name: asserts.relative(moments.nu[name], 0.001 * (clip * grad) ** 2) for name, grad in gradients.items()}
    return max(*mu.values(), *nu.values())


@pytest.mark.slow
def test_moments_are_those_of_our_gradients(recorded, gradients):
    """But for GPT-J's z-loss, which it computes otherwise."""
    moments = read(recorded / "fixed-2").moments
    assert moments.steps == 1
    assert _apart(moments, gradients) < 5e-3


def test_positions_have_moments_too_large_in_gptj(recorded, gradients, monkeypatch):
    rules = tuple(rule._replace(gathered=False) for rule in gptj.POSITION_RULES["learned"])
    monkeypatch.setitem(gptj.POSITION_RULES, "learned", rules)
    assert _apart(read(recorded / "fixed-2").moments, gradients) > 0.5


def some_state(config, with_moments: bool) -> State:
    """Any bits, including negative zeros and subnormal values."""
    random = np.random.default_rng(0)

    def leaves(positive=False):
        made = {}
        for name, shape in gptj.list_shapes(config).items():
            leaf = random.standard_normal(shape).astype(np.float32)
            leaf[..., 0], leaf[..., 1] = -0.0, 1.4e-45
            made[name] = np.abs(leaf) if positive else leaf
        if config.model.embed == "plain":
            del made[gptj.TABLE_BIAS]
        made[gptj.HEAD_BIAS][config.model.vocab :] = 0
        return made

    moments = Moments(7, leaves(), leaves(positive=True)) if with_moments else None
    return State(9, leaves(), moments)


def bits(state: State):
    return jax.tree.map(lambda leaf: (np.asarray(leaf).dtype, np.asarray(leaf).tobytes()), state)


@pytest.mark.slow
@pytest.mark.parametrize("with_moments", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("positions", ["rotary", "learned", "t5", "none"])
def test_there_and_back_is_bitwise(tmp_path, positions, count, with_moments):
    config = shared.tiny(positions=positions, embed="bias" if positions == "rotary" else "plain")
    before = some_state(config, with_moments)
    gptj_state.write_state(tmp_path, config, before, count, np.float32)
    assert bits(gptj_state.open_state(tmp_path, config)) == bits(before)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["to a run", "to GPT-J"])
def test_no_more_than_the_largest_leaf_is_in_memory(tmp_path, monkeypatch, way):
    monkeypatch.setattr(leaves, "BLOCK", 2**16)
    config = shared.tiny(layers=8, d_model=256, mesh="1x1")
    state, sizes = some_state(config, with_moments=True), {}
    run = Run(config.replace(out=str(tmp_path / "run")), TokenIds(config.model.vocab), "")
    runs.write_run(run.out, run, State(state.step, *map(filled, state[1:])))
    gptj_state.write_state(tmp_path, config, state, 1, np.dtype(np.float32))
    largest = max(leaf.nbytes for leaf in state.params.values())
    for streamed in (True, False):
        with contextlib.ExitStack() as stack, in_memory() as peak:
            if way == "to a run":
                found = gptj_state.open_state(tmp_path, config)
                found = found if streamed else State(found.step, *map(filled, on_host(found)[1:]))
                runs.write_run(tmp_path / f"run-{streamed}", run, found)
            else:
                found = stack.enter_context(runs.open_state(run, 0, with_moments=True))
                found = found if streamed else on_host(found)
                (tmp_path / f"gptj-{streamed}").mkdir()
                gptj_state.write_state(tmp_path / f"gptj-{streamed}", config, found, 1, np.dtype(np.float32))
        sizes[streamed] = peak[0] / largest
    assert sizes[True] < (1.1 if way == "to a run" else 1.25)  # a checkpoint's reader makes room for a piece, one leaf
    assert sizes[False] > 8  # three times twelve matrices, of which the largest leaf has four


def filled(tree):
    """Returns full arrays in the form that a conversion writes."""

    def fill(leaf):
        if not np.ndim(leaf):
            return leaf
        return leaves.Filled(leaf.shape, leaf.dtype, functools.partial(np.copyto, src=leaf))

    return jax.tree.map(fill, tree)


@contextlib.contextmanager
def in_memory():
    """Yields a list that receives the peak memory of the block, in bytes."""
    peak, thresholds = [], gc.get_threshold()
    gc.collect()
    gc.freeze()  # the collector need not scan the objects of earlier tests
    gc.set_threshold(700, 10, 10)  # Python's defaults; the tests' are higher
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
        gc.set_threshold(*thresholds)


def test_equal_shares_would_lose_bits(tmp_path, broken):
    def cut_equally(self, whole, layer, shard, shards):
        return whole[layer or ...] / np.float32(shards)

    broken(gptj.Summed, "cut", cut_equally)
    config = shared.tiny()
    before = some_state(config, with_moments=False)
    gptj_state.write_state(tmp_path, config, before, 8, np.float32)
    assert bits(gptj_state.open_state(tmp_path, config)) != bits(before)


def test_bfloat16_is_two_bytes_on_disk_and_comes_back(tmp_path):
    config = shared.tiny()
    before = some_state(config, with_moments=True)
    before = before._replace(params=jax.tree.map(lambda p: p.astype(jax.numpy.bfloat16), before.params))
    before = before._replace(params=jax.tree.map(lambda p: p.astype(np.float32), before.params))
    gptj_state.write_state(tmp_path, config, before, 2, jax.numpy.bfloat16)
    with np.load(tmp_path / "shard_0" / "15.npz") as piece:
        assert piece["arr_0"].dtype == np.dtype("V2")
    assert bits(gptj_state.open_state(tmp_path, config)) == bits(before)


@pytest.mark.parametrize("case", ["rotary-4", "fixed-2"])
def test_files_written_are_those_of_gptj(recorded, tmp_path, case):
    """Names, order, shapes, dtypes and pieces are; and the bytes of all but what is summed."""
    config, count = gptj_settings.read_config(recorded / case / "config.json")
    found = read(recorded / case)
    gptj_state.write_state(tmp_path, config, found, count, np.dtype("float32" if found.moments else jax.numpy.bfloat16))
    entries = gptj_state.list_entries(config, found.moments is not None)
    for entry, ours, theirs in zip(
        entries, shard_files.list_members(tmp_path, 1), shard_files.list_members(recorded / case, 1), strict=True
    ):
        assert ours._replace(path=ours.path.name) == theirs._replace(path=theirs.path.name)
        rule = entry.leaf and entry.leaf.rule
        if not rule or isinstance(rule.shards, gptj.Split):
            assert ours.read().tobytes() == theirs.read().tobytes(), entry.name


def test_every_key_of_the_model_is_written_or_checked():
    """A key without a mapping would be lost in the conversion to GPT-J."""
    written = {"layers", "d_model", "heads", "seq", "vocab", "vocab_multiple", "positions", "rotary_dims", "embed"}
    compared_with_heads_and_width = {"kv_heads", "d_ff"}
    of_others = {"window_chunks", "window_rotary_theta", "query_growth_tokens", "q_latent", "value_dim"}
    without_effect = {"init_std"} | of_others  # without window, query_growth and kv_latent
    compared_by_its_factors = {"scale"}
    keys = {field.name for field in dataclasses.fields(ModelKeys)}
    others = compared_with_heads_and_width | compared_by_its_factors
    assert keys - set(gptj.FIXED) == written | others | without_effect


def test_run_at_its_tuned_size_is_a_gptj():
    tiny = shared.tiny().model
    gptj.check_expressible(shared.tiny(scale=f"completep:{tiny.d_model}x{tiny.layers}"))
    with pytest.raises(UsageError, match=r"logits_scale=0\.5 has no counterpart in GPT-J"):
        gptj.check_expressible(shared.tiny(scale=f"completep:{tiny.d_model // 2}x{tiny.layers}"))


@pytest.mark.parametrize(
    "override",
    [
        {"block": "sequential"},
        {"norm": "rmsnorm"},
        {"bias": "none"},
        {"bias": "all"},
        {"tied": True},
        {"d_ff": 64},
        {"head_bias": False},
        {"activation": "relu"},
        {"kv_heads": 4},
        {"norm_eps": 1e-6},
        {"attention_scale": 0.5},
        {"rotary_theta": 500.0},
        {"rotary_scaling": "linear:2"},
        {"positions": "alibi"},
        {"embed": "norm"},
        {"previous_tokens": 1},
        {"embed_dim": 16},
    ],
)
def test_what_gptj_cannot_compute_is_refused_by_name(override):
    (name,) = override
    with pytest.raises(UsageError, match=f"{name}=.* has no counterpart in GPT-J"):
        gptj.check_expressible(shared.tiny(**override))
    gptj.check_expressible(shared.tiny(), 8)
    with pytest.raises(UsageError, match=r"heads \(8\) does not divide into shards=3"):
        gptj.check_expressible(shared.tiny(), 3)
