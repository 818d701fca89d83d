"""One layer on four shards against NumPy, for every kind of block, activation and bias.

Both compute in float64, with the constants that the program stores in float32.
"""

import functools
import math

import jax
import numpy as np
import pytest

from shardformer.adapters.adapter_layer import Adapters
from shardformer.config import FIELDS, parsing
from shardformer.kernels.attention import AttentionOptions, Plain
from shardformer.model import Model
from shardformer.shards.layer import TransformerLayerShard, multiply
from shardformer.shards.positions import find_rotation
from tests import asserts, sharded, shared

B, T, D, H = 2, 7, 32, 8
X = sharded.normal(0, B, T, D)
POSITIONS = np.arange(3, 3 + T, dtype=np.int32)
CASES = {
    "parallel": {},
    "two norms": {"block": "parallel_two_norms", "bias": "all_but_qkv", "activation": "gelu_exact"},
    "sequential": {"block": "sequential", "bias": "all", "norm": "rmsnorm", "activation": "relu", "d_ff": 64},
    "grouped swiglu": {"kv_heads": 4, "activation": "swiglu", "bias": "none", "rotary_dims": 2},
    "scaled": {"attention_scale": 0.9, "bias": "all", "rotary_theta": 100.0, "norm_eps": 0.5, "activation": "silu"},
    "wide heads": {"head_dim": 6, "rotary_dims": 2, "bias": "qkv", "block": "sequential", "norm": "rmsnorm"},
    "norms of heads": {
        "head_dim": 5,
        "positions": "none",
        "qk_norm": "head",
        "kv_heads": 4,
        "bias": "none",
        "norm": "rmsnorm_plus_one",
    },
    "norm over heads": {"qk_norm": "all", "block": "sequential_post_norms", "norm": "rmsnorm", "kv_heads": 4},
    "four norms": {
        "block": "sequential_four_norms",
        "activation": "geglu",
        "bias": "qkv_norm",
        "norm": "rmsnorm_plus_one",
    },
    "sinks": {"sinks": True, "kv_heads": 4, "bias": "attention", "activation": "clamped_swiglu", "norm": "rmsnorm"},
    "adapters": {"lora_rank": 3, "lora_targets": "q,v,o,up,down", "lora_alpha": 2.0},
    "patterns": {
        "lora_rank": 3,
        "lora_targets": "q:4,v:3:5,down:2:4",
        "lora_alpha": 2.0,
        "rslora": True,
    },
}


GATES = {"swiglu": "silu", "geglu": "gelu"}


def settings(case):
    return shared.tiny(mesh="1x4", layers=1, **CASES[case])


@functools.cache
def draw_parameters(case):
    """Draws one layer's parameters, none of them zero, as {module: {name: leaf}} without the prefix."""
    shapes = Model.abstract_parameters(settings(case))
    layers = {module: leaves for module, leaves in shapes.items() if module.startswith("transformer/layers")}
    parameters = {}
    for module, leaves in layers.items():
        random = np.random.RandomState(len(parameters))
        parameters[module.removeprefix("transformer/")] = {
            name: (random.normal(size=leaf.shape[1:]) / 4).astype(np.float32) for name, leaf in leaves.items()
        }
    return parameters


def apply_norm(c, p, x):
    if c.model.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return divide_by_root(c, x) * (p["scale"] + (c.model.norm == "rmsnorm_plus_one")) + p.get("offset", 0.0)


def divide_by_root(c, x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(c.model.norm_eps))


def split_heads(c, p, name, x):
    """Returns queries, keys or values [B, T, heads, K], with the norms of qk_norm."""
    x = multiply_in_numpy(c, p, name, x)
    if c.model.qk_norm == "all" and name != "v":
        x = divide_by_root(c, x) * (p[f"{name}_scale"] + (c.model.norm == "rmsnorm_plus_one"))
    x = x.reshape(B, T, -1, c.model.head_dim or D // H)
    if c.model.qk_norm == "head" and name != "v":
        x = divide_by_root(c, x) * (p[f"{name}_head_scale"] + (c.model.norm == "rmsnorm_plus_one"))
    return x


def multiply_in_numpy(c, p, name, x):
    y = x @ p[name] + p.get(f"{name}_bias", 0.0)
    if f"{name}_lora_in" in p:
        scale = (
            {"q": 1.0, "v": 5 / 3**0.5, "down": 4 / 2**0.5}[name]
            if c.lora.rslora
            else c.lora.lora_alpha / c.lora.lora_rank
        )
        y = y + x @ p[f"{name}_lora_in"] @ p[f"{name}_lora_out"] * np.float32(scale)
    return y


def clamped_swiglu(up, gate):
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(-np.float32(1.702) * gate)) * (np.clip(up, -7, 7) + 1)


def activate(name, x):
    if name == "gelu":
        return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))
    if name == "gelu_exact":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x * np.float32(np.sqrt(0.5))))
    return np.maximum(x, 0) if name == "relu" else x / (1 + np.exp(-x))


def rotate(c, x):
    if c.model.positions == "none":
        return x
    dims = c.model.rotary_dims or x.shape[-1]
    turns = np.float32(1) / np.float32(c.model.rotary_theta) ** (np.arange(0, dims, 2, dtype=np.float32) / dims)
    angle = POSITIONS[:, None] * np.float64(turns)
    turned = (x[..., 0:dims:2] + 1j * x[..., 1:dims:2]) * np.exp(1j * angle)[None, :, None, :]
    out = x.copy()
    out[..., 0:dims:2], out[..., 1:dims:2] = turned.real, turned.imag
    return out


def attend(c, p, h):
    q, k, v = (split_heads(c, p, name, h) for name in "qkv")
    k, v = (np.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    scale = np.float32(c.model.attention_scale or q.shape[-1] ** -0.5)
    logits = np.einsum("bthk,bshk->bhts", rotate(c, q), rotate(c, k)) * scale
    weights = np.exp(np.where(np.tril(np.ones((T, T), bool)), logits, -np.inf))
    sinks = np.exp(p["sinks"])[:, None, None] if c.model.sinks else 0.0
    values = np.einsum("bhts,bshk->bthk", weights / (weights.sum(-1, keepdims=True) + sinks), v)
    return multiply_in_numpy(c, p, "o", values.reshape(B, T, -1))


def feed_forward(c, p, h):
    up = multiply_in_numpy(c, p, "up", h)
    if c.model.activation == "clamped_swiglu":
        return multiply_in_numpy(c, p, "down", clamped_swiglu(up, multiply_in_numpy(c, p, "gate", h)))
    if c.model.activation in GATES:
        return multiply_in_numpy(
            c, p, "down", activate(GATES[c.model.activation], multiply_in_numpy(c, p, "gate", h)) * up
        )
    return multiply_in_numpy(c, p, "down", activate(c.model.activation, up))


def apply_in_numpy(case):
    c = settings(case)
    tree = jax.tree.map(np.float64, draw_parameters(case))
    p, x = tree["layers"], X.astype(np.float64)

    def norm(name, x):
        return apply_norm(c, tree[f"layers/{name}"], x) if f"layers/{name}" in tree else x

    if "sequential" in c.model.block:
        x = x + norm("post_attention_norm", attend(c, p, norm("attention_norm", x)))
        return x + norm("post_feed_forward_norm", feed_forward(c, p, norm("feed_forward_norm", x)))
    if c.model.block == "parallel":
        h = apply_norm(c, tree["layers/norm"], x)
        return x + attend(c, p, h) + feed_forward(c, p, h)
    attended = attend(c, p, apply_norm(c, tree["layers/attention_norm"], x))
    return x + attended + feed_forward(c, p, apply_norm(c, tree["layers/feed_forward_norm"], x))


def apply_layer(case, run=sharded.on_mesh):
    config = settings(case)
    frequency = find_rotation(config) if config.model.positions == "rotary" else None
    product = Adapters(config).multiply if config.lora.lora_rank else multiply

    def layer(x, positions):
        return TransformerLayerShard(config, Plain(), product)(x, AttentionOptions(positions, frequency))[0]

    return sharded.apply(layer, config, draw_parameters(case), X, POSITIONS, run=run)


@pytest.mark.parametrize("case", CASES)
def test_layer_is_that_of_numpy(case):
    got, expected = apply_layer(case), apply_in_numpy(case)
    assert asserts.relative(got, expected) < 1e-13
    assert asserts.relative(got, X) > 0.1


def test_compiled_layer_is_that_of_numpy():
    """One case: integration tests compile the others as models."""
    got = apply_layer("adapters", run=sharded.compile_on_mesh)
    assert asserts.relative(got, apply_in_numpy("adapters")) < 1e-6


def test_every_parameter_of_a_layer_counts():
    """The twin: the reference changes with each of the parameters."""
    for case in CASES:
        expected, parameters = apply_in_numpy(case), draw_parameters(case)
        for module, leaves in parameters.items():
            for name in leaves:
                kept, leaves[name] = leaves[name], np.roll(leaves[name], 1, axis=-1)
                assert asserts.relative(apply_in_numpy(case), expected) > 1e-5, (case, module, name)
                leaves[name] = kept


@pytest.mark.parametrize("block", parsing.choices(FIELDS["block"]))
@pytest.mark.parametrize(
    ("bias", "names"),
    [("none", ""), ("ff", "down up"), ("all_but_qkv", "down o up"), ("all", "down k o q up v"), ("qkv", "k q v"),
     ("attention", "k o q v"), ("norm", ""), ("qkv_norm", "k q v")],
)  # fmt: skip
def test_bias_key_chooses_the_biases(block, bias, names):
    shapes = Model.abstract_parameters(shared.tiny(mesh="1x1", block=block, bias=bias))
    found = sorted(name for name in shapes["transformer/layers"] if name.endswith("_bias"))
    assert found == [f"{name}_bias" for name in names.split()]
    norms = [leaves for module, leaves in shapes.items() if "norm" in module]
    assert all(("offset" in leaves) == (bias not in ("none", "attention", "qkv")) for leaves in norms)
    assert ("bias" in shapes["transformer/head"]) == (bias in ("ff", "all_but_qkv", "all"))


NORMS = {
    "parallel": "norm", "parallel_two_norms": "attention_norm feed_forward_norm",
    "sequential": "attention_norm feed_forward_norm",
    "sequential_four_norms": "attention_norm feed_forward_norm post_attention_norm post_feed_forward_norm",
    "sequential_post_norms": "post_attention_norm post_feed_forward_norm",
    "sequential_sum_norms": "attention_norm feed_forward_norm",
}  # fmt: skip


@pytest.mark.parametrize("block", NORMS)
def test_block_key_chooses_the_norms(block):
    shapes = Model.abstract_parameters(shared.tiny(mesh="1x1", block=block))
    found = [module.removeprefix("transformer/layers/") for module in shapes if "layers/" in module]
    assert " ".join(sorted(found)) == NORMS[block]
