"""The blocks of published families on every kind of mesh: exactly the numbers of one device and of the plain model."""

import jax
import numpy as np
import pytest

from shardformer.analysis import verify_exact
from tests import asserts, meshes, shared
from tests.integration.test_parity import worst_leaf

BLOCKS = {
    "qwen": {
        "block": "sequential", "norm": "rmsnorm", "bias": "qkv", "qk_norm": "head", "head_dim": 6,
        "activation": "swiglu",
    },
    "gemma": {
        "block": "sequential_four_norms", "norm": "rmsnorm_plus_one", "bias": "none", "qk_norm": "head", "head_dim": 6,
        "activation": "geglu", "embed_scale": None, "logits_cap": 0.1, "tied": True,
    },
    "olmo": {
        "block": "sequential_post_norms", "norm": "rmsnorm", "bias": "none", "qk_norm": "all", "activation": "swiglu",
        "z_loss": 1e-2, "rotary_theta": 100.0, "rotary_scaling": "yarn:4,0.5,3,12,1.5",
    },
    "stablelm": {"block": "parallel", "bias": "qkv_norm", "activation": "swiglu", "rotary_dims": 2},
    "granite": {
        "block": "sequential", "norm": "rmsnorm", "bias": "none", "activation": "swiglu", "tied": True,
        "embed_scale": 3.0, "residual_scale": 0.6, "attention_scale": 0.3, "logits_scale": 0.4,
        "rotary_theta": 100.0, "rotary_scaling": "longrope:8,1.5,1,1.2,2,4",
    },
    "cohere": {
        "block": "parallel", "norm": "plain_layernorm", "bias": "none", "activation": "swiglu", "logits_scale": 3.0,
        "window": 5, "window_pattern": "nw", "rotary_theta": 100.0, "rotary_scaling": "yarn:4,0.5,3,12,1.5",
    },
    "hunyuan": {
        "block": "sequential", "norm": "rmsnorm", "bias": "none", "qk_norm": "rotated_head", "activation": "swiglu",
        "query_growth": 0.5, "rotary_theta": 100.0, "rotary_scaling": "yarn:4,0.5,3,6,1.5",
    },
    "llama4": {
        "block": "sequential", "norm": "rmsnorm", "bias": "none", "activation": "swiglu", "rotary_theta": 100.0,
        "window": 5, "window_chunks": True, "window_pattern": "wn", "qk_norm": "rotated_plain", "query_growth": 0.5,
        "query_growth_tokens": 4, "experts": 4, "experts_per_token": 1, "expert_width": 16, "shared_width": 16,
        "router": "sigmoid", "router_norm": False, "gate_inputs": True, "expert_pattern": "de",
    },
    "xglm": {"block": "sequential", "bias": "all", "positions": "sinusoids", "embed_scale": None, "tied": True},
    "opt": {
        "block": "sequential_sum_norms", "bias": "all", "positions": "learned", "embed_dim": 24, "tied": True,
    },
    "bloom": {"block": "sequential", "bias": "all", "positions": "alibi", "embed": "norm", "tied": True},
}  # fmt: skip
ADAPTERS = {"lora_rank": 2, "lora_targets": "q,k,v,gate"}
ROWS = [
    ("qwen", "4x2", {"sequence_parallel": True, "zero": 3}),
    ("gemma", "1x8", {"sequence_parallel": True, "loss_chunk": 5, "remat": "dots"}),
    pytest.param("gemma", "2x2x2", {"accum": 2, "remat": "full", "dropout": 0.1}, marks=pytest.mark.slow),
    ("olmo", "2x4", {"sequence_parallel": True, "zero": 1, "accum": 2}),
    pytest.param("olmo", "4x2", ADAPTERS, marks=pytest.mark.slow),
    ("stablelm", "2x4", {"scan": False}),
    ("bloom", "2x4", {"sequence_parallel": True, "zero": 3, "attention": "blocks"}),
    ("bloom", "dp2.cp2.mp2", {}),
    ("opt", "4x2", {"sequence_parallel": True, "zero": 3, "dropout": 0.1}),
    ("opt", "1x8", {}),
    ("xglm", "dp2.cp2.mp2", {}),
    pytest.param("xglm", "2x4", {"sequence_parallel": True, "documents": "masked"}, marks=pytest.mark.slow),
    ("hunyuan", "2x4", {"sequence_parallel": True, "zero": 3, "remat": "full"}),
    pytest.param("hunyuan", "dp2.cp2.mp2", {}, marks=pytest.mark.slow),
    ("llama4", "4x2", {"sequence_parallel": True, "zero": 3, "attention": "blocks"}),
    ("llama4", "2x8", {"expert_bias": True, "experts_per_token": 2}),
    ("llama4", "dp2.cp2.mp2", {"scan": False, "remat": "full"}),
    ("granite", "2x4", {"sequence_parallel": True, "zero": 3, "loss_chunk": 5}),
    ("cohere", "1x8", {"sequence_parallel": True, "remat": "full"}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), ROWS)
def test_block_equals_one_device_and_the_plain_model(name, mesh, options):
    meshes.assert_equals_one_device(with_steps=options is ADAPTERS, mesh=mesh, **BLOCKS[name] | options)


@pytest.mark.slow
def test_compiled_block_equals_the_plain_model():
    name, mesh, options = ROWS[1]  # with more keys than any other
    t = shared.trainer(mesh=mesh, **BLOCKS[name] | options)
    params = perturb(shared.drawn(t.config, 0))
    losses, gradients = jax.jit(t.model.loss_and_grad)(
        jax.device_put(params, t.model.shardings), shared.batch(), t.dropout_key(0)
    )
    expected = verify_exact.compute_dense(t.config, params, shared.batch(), None)
    assert abs(float(losses.loss) / float(expected.loss) - 1) < 1e-6
    assert worst_leaf(shared.on_host(gradients), expected.gradients) < 1e-5


def perturb(params):
    """Makes scales and biases differ from 1 and 0."""

    def shift(p):
        wave = np.sin(np.arange(p.size, dtype=p.dtype)).reshape(p.shape)
        return p + np.float32(0.1) * wave if p.ndim <= 2 else 3 * p

    return jax.tree.map(shift, params)


WRONG = [
    ("qwen", {"qk_norm": "none"}), ("gemma", {"logits_cap": None}), ("gemma", {"embed_scale": 1.0}),
    ("gemma", {"norm": "rmsnorm"}), ("gemma", {"activation": "swiglu"}), ("gemma", {"qk_norm": "none"}),
    ("olmo", {"qk_norm": "none"}), ("bloom", {"positions": "none"}), ("bloom", {"embed": "plain"}),
    ("xglm", {"positions": "none"}), ("opt", {"block": "sequential"}),
    ("hunyuan", {"qk_norm": "head"}), ("hunyuan", {"query_growth": 0.0}),
    ("granite", {"embed_scale": 1.0}), ("granite", {"residual_scale": 1.0}), ("granite", {"logits_scale": 1.0}),
    ("granite", {"rotary_scaling": "longrope:16,1.5,1,1.2,2,4"}), ("cohere", {"window_pattern": "fw"}),
    ("llama4", {"window": 4}), ("llama4", {"window_chunks": False}), ("llama4", {"window_pattern": "nw"}),
    ("llama4", {"qk_norm": "none"}), ("llama4", {"query_growth_tokens": 5}), ("llama4", {"gate_inputs": False}),
    ("cohere", {"window": 4}), ("cohere", {"norm": "rmsnorm"}), ("cohere", {"rotary_scaling": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), WRONG)
def test_each_key_changes_the_plain_models_numbers(name, changes):
    config = shared.tiny(mesh="1x1", **BLOCKS[name])
    params = verify_exact.draw_parameters(config)
    tokens = shared.batch()["tokens"]
    got, expected = (meshes.compute_logits(c, params, tokens) for c in (config.replace(**changes), config))
    assert asserts.relative(got, expected) > 1e-3
