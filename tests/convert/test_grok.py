"""Grok-1's checkpoint as a run: its logits are those that Grok-1's own code gave under jax 0.4.25.

`tests/legacy/grok_driver.py` recorded them; its `weight` makes the same weights here, without Grok-1's code.
"""

import dataclasses
import functools
import pickle
import sys
import tracemalloc
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import DictKey

from shardformer.__main__ import main
from shardformer.convert import grok, grok_pickles, runs
from shardformer.errors import RunError, UsageError
from shardformer.inference import Generator, Sampling
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.training.run_folder import Run
from tests.legacy.grok_driver import TOKENS, weight

GOLDENS = Path(__file__).parents[1] / "legacy" / "goldens"
# The driver's settings, as keys of a run.
KEYS = {"head_dim": 32, "attention_scale": 0.2, "embed_scale": 8.0, "logits_scale": 0.6, "seq": 64}
EXPERTS = [("moe/linear", "w", (8, 64, 88)), ("moe/linear_1", "w", (8, 88, 64)), ("moe/linear_v", "w", (8, 64, 88))]
DENSE = [("linear", "w", (64, 88)), ("linear_1", "w", (88, 64)), ("linear_v", "w", (64, 88))]
EVERY = [
    ("multi_head_attention/key", "w", (64, 256)), ("multi_head_attention/linear", "w", (256, 64)),
    ("multi_head_attention/query", "w", (64, 256)), ("multi_head_attention/value", "w", (64, 256)),
    ("rms_norm", "scale", (64,)), ("rms_norm_1", "scale", (64,)), ("rms_norm_2", "scale", (64,)),
    ("rms_norm_3", "scale", (64,)),
]  # fmt: skip
ROUTER = [("router", "w", (64, 8))]
SAME = 1e-5


@dataclasses.dataclass
class QuantizedWeight8bit:
    """Stands for the class of Grok-1's `model.py`."""

    weight: np.ndarray
    scales: np.ndarray


def list_weights(shape):
    layer = [*EXPERTS, *EVERY, *ROUTER] if shape == "1x8" else [*DENSE, *EVERY]
    named = [(f"transformer/decoder_layer_{number}/{name}", *rest) for number in (0, 1) for name, *rest in layer]
    named = [
        ("language_model/in_out_embed", "embeddings", (131072, 64)), ("language_model/rms_norm", "scale", (64,)), *named
    ]  # fmt: skip
    split = tuple(map(int, shape.split("x")))
    return [
        weight(number, (DictKey(module), DictKey(leaf)), size, split, QuantizedWeight8bit)
        for number, (module, leaf, size) in enumerate(named)
    ]


def expand(value):
    """Multiplies a quantised weight by its scales, row by row."""
    if isinstance(value, np.ndarray):
        return value
    each = value.weight.shape[-2] // value.scales.shape[-2]
    return value.weight * np.repeat(value.scales, each, axis=-2)


def write(folder, weights):
    """Writes the files as `fast_pickle` of Grok-1's checkpoint.py does."""
    folder.mkdir(parents=True)
    for number, value in enumerate(weights):
        (folder / f"tensor{number:05d}_000").write_bytes(pickle.dumps(value, protocol=4))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoints of both meshes, and that of 1x8 without quantised weights."""
    home = tmp_path_factory.mktemp("grok")
    module = types.ModuleType("model")
    module.QuantizedWeight8bit = QuantizedWeight8bit
    QuantizedWeight8bit.__module__ = "model"  # the name in the pickle
    before = sys.modules.get("model")
    sys.modules["model"] = module
    try:
        for shape in ("1x8", "2x4"):
            write(home / shape / "ckpt-0", list_weights(shape))
        write(home / "plain" / "ckpt-0", map(expand, list_weights("1x8")))
    finally:
        sys.modules.pop("model") if before is None else sys.modules.update(model=before)
    return home


@functools.cache
def open_model(folder):
    config, files = grok.read_config(folder / "ckpt-0", dict(KEYS))
    config = config.replace(mesh="1x1", batch=2)
    return Model.on(config, mesh.make(config)), grok.open_params(config, files)


def compute_logits(model, params, tokens):
    params = {name: np.asarray(leaf) for name, leaf in params.items()}
    return np.asarray(jax.jit(Decoder(model).logits)(runs.nest(model.shapes, params), tokens))


def distance(model, params, shape):
    golden = np.load(GOLDENS / f"grok_{shape}.npz")
    logits = compute_logits(model, params, TOKENS[: len(golden["logits"])])
    assert logits.argmax(-1).tolist() == golden["best"].tolist()
    return np.abs(logits[..., ::1024] - golden["logits"]).max()


@pytest.mark.parametrize("shape", ["1x8", pytest.param("2x4", marks=pytest.mark.slow)])
def test_logits_are_those_of_grok(checkpoints, shape):
    """1x8 has quantised experts, 2x4 has dense layers of float32."""
    found = distance(*open_model(checkpoints / shape), shape)
    assert found < SAME, found


# router_norm is no such change: the norm after the experts divides its factor out, but for norm_eps.
@pytest.mark.parametrize(
    "change", [{"experts_per_token": 1}, pytest.param({"attention_cap": 3.0}, marks=pytest.mark.slow)]
)
def test_other_arithmetic_shows_in_the_logits(checkpoints, change):
    model, params = open_model(checkpoints / "1x8")
    changed = model.config.replace(**change)
    golden = np.load(GOLDENS / "grok_1x8.npz")["logits"]
    logits = compute_logits(Model.on(changed, mesh.make(changed)), params, TOKENS[:1])
    assert np.abs(logits[..., ::1024] - golden).max() > 100 * SAME


@pytest.mark.parametrize("name", ["q", pytest.param("expert_gate", marks=pytest.mark.slow)])
def test_wrong_order_of_columns_shows_in_the_logits(checkpoints, name):
    """The rotary pairs of q as they are stored, and the matrices of gate and up exchanged."""
    model, params = open_model(checkpoints / "1x8")
    at = "transformer/layers/"
    whole = np.asarray(params[at + name])
    halves = whole.reshape(2, 64, 8, 16, 2).swapaxes(-1, -2).reshape(whole.shape) if name == "q" else None
    swapped = {at + "q": halves} if name == "q" else {at + name: params[at + "expert_up"], at + "expert_up": whole}
    logits = compute_logits(model, params | swapped, TOKENS[:1])[..., ::1024]
    assert np.abs(logits - np.load(GOLDENS / "grok_1x8.npz")["logits"]).max() > 100 * SAME


@pytest.mark.slow
def test_generate_writes_the_best_tokens_of_grok(checkpoints):
    """The first is recorded; the others, from the cache, are the best of the logits without a cache."""
    model, params = open_model(checkpoints / "1x8")
    on_device = runs.nest(model.shapes, {name: np.asarray(leaf) for name, leaf in params.items()})
    prompt, new = TOKENS[0], 4
    written = Generator(model).generate(on_device, prompt, Sampling(tokens=new, temperature=0))[0]
    assert written[len(prompt)] == np.load(GOLDENS / "grok_1x8.npz")["best"][0, -1]
    logits = compute_logits(model, params, np.asarray(written)[None, :-1])
    assert written[len(prompt) :].tolist() == logits[0, -new:].argmax(-1).tolist()


def test_plain_and_quantised_weights_are_the_same(checkpoints):
    (_, plain), (_, quantised) = open_model(checkpoints / "plain"), open_model(checkpoints / "1x8")
    for name, leaf in plain.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(quantised[name]))


def test_convert_makes_a_run_with_the_same_weights(checkpoints, tmp_path, capsys):
    keys = [f"{name}={value}" for name, value in KEYS.items()]
    assert main(["convert", str(checkpoints / "2x4"), str(tmp_path / "run"), *keys]) == 0
    assert "of a Grok-1 model" in capsys.readouterr().out
    _, params = open_model(checkpoints / "2x4")
    with runs.open_state(Run.open(tmp_path / "run"), 0, with_moments=False) as state:
        for name, leaf in params.items():
            np.testing.assert_array_equal(np.asarray(state.params[name]), np.asarray(leaf))


def test_order_of_files_is_that_of_jax():
    names = grok.list_names(11, has_experts=True)
    paths = jax.tree_util.tree_leaves_with_path({name: {"w": 0} for name in reversed(names)})
    assert names == [path[0].key for path, _ in paths]
    assert len(grok.list_names(64, has_experts=True)) == 770  # files of the published checkpoint


def test_missing_file_is_named(checkpoints, tmp_path):
    write(tmp_path / "less", list_weights("2x4")[:-1])
    with pytest.raises(RunError, match="has 23 files, expected 2 and 11 for each layer"):
        grok.read_config(tmp_path / "less", dict(KEYS))


def test_wrong_head_size_is_named(checkpoints):
    with pytest.raises(UsageError, match="head_dim=48 does not divide the width 256 of the query matrix"):
        grok.read_config(checkpoints / "2x4" / "ckpt-0", KEYS | {"head_dim": 48})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_arrays_of_numpy_and_jax_are_read(tmp_path, dtype, make):
    values = np.arange(-6, 6).reshape(3, 4).astype(jnp.dtype(dtype))
    (tmp_path / "file").write_bytes(pickle.dumps(make(values), protocol=4))
    np.testing.assert_array_equal(grok_pickles.read_weight(tmp_path / "file"), values.astype(np.float32))


class Attack:
    def __reduce__(self):
        return (print, ("this was run",))


OTHERS = [Attack(), {"weight": 1}, np.ones(2, np.float64), np.array([None]), np.ones([1] * 5, np.float32)]


@pytest.mark.parametrize("content", OTHERS)
def test_other_pickles_are_rejected_and_not_run(tmp_path, capsys, content):
    (tmp_path / "file").write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(UsageError, match="was not loaded, as it may hold only an array"):
        grok_pickles.read_weight(tmp_path / "file")
    assert "this was run" not in capsys.readouterr().out


def test_damaged_file_is_an_error_of_the_user(tmp_path):
    whole = pickle.dumps(np.arange(6, dtype=np.float32), protocol=4)
    for length in range(len(whole)):
        (tmp_path / "file").write_bytes(whole[:length])
        with pytest.raises(UsageError, match="was not loaded"):
            grok_pickles.read_weight(tmp_path / "file")


def test_shape_is_read_without_the_content(tmp_path):
    rows = 1 << 20
    values = np.ones((rows, 8), np.int8)
    write(tmp_path / "grok", [values])
    path = tmp_path / "grok" / grok.FIRST
    tracemalloc.start()
    assert grok_pickles.read_shape(path) == (rows, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes / 10
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="was not loaded"):
        grok_pickles.read_shape(path)


def test_scales_that_do_not_fit_are_rejected():
    with pytest.raises(grok_pickles.UnpicklingError, match="6 rows do not divide into 4 rows of scales"):
        grok_pickles._multiply(np.ones((6, 2), np.int8), np.ones((4, 2), np.float32))
