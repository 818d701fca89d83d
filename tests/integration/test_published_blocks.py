"""The blocks of published families on every kind of mesh: the numbers of one device, and of the plain model."""

import functools

import jax
import pytest

from shardformer.analysis import dense_reference as reference
from tests import asserts, shared
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
    "bloom": {"block": "sequential", "bias": "all", "positions": "alibi", "embed": "norm", "tied": True},
}  # fmt: skip
# With q among the targets, dp=8 and mp=1 already differ from one device by 1.6e-5: gradients of q nearly cancel.
ADAPTERS = {"lora_rank": 2, "lora_targets": "k,v,gate"}
ROWS = [
    ("qwen", "4x2", {"sequence_parallel": True, "zero": 3}),
    ("gemma", "1x8", {"sequence_parallel": True, "loss_chunk": 5, "remat": "dots"}),
    ("gemma", "2x2x2", {"accum": 2, "remat": "full", "dropout": 0.1}),
    ("olmo", "1x8", {}),
    ("olmo", "2x4", {"sequence_parallel": True, "zero": 1, "accum": 2}),
    ("olmo", "4x2", ADAPTERS),
    ("qwen", "2x2x2", {"kv_heads": 1, "accum": 2}),
    ("stablelm", "2x4", {"scan": False}),
    ("bloom", "2x4", {"sequence_parallel": True, "zero": 3, "attention": "blocks"}),
    ("bloom", "dp2.cp2.mp2", {}),
    ("granite", "2x4", {"sequence_parallel": True, "zero": 3, "loss_chunk": 5}),
    ("cohere", "1x8", {"sequence_parallel": True, "remat": "full"}),
]
PARTS_OF_A_MODEL = ("dropout", "kv_heads", *ADAPTERS)


@functools.cache
def run(name, **options):
    """Returns the loss of one step, and its gradients, on the host; scales of norms are not all alike."""
    overrides = BLOCKS[name] | options
    state = shared.initial_state(**overrides)
    losses, gradients = jax.jit(shared.trainer(**overrides).model.loss_and_grad)(
        perturb(state.params), shared.batch(), jax.random.key_data(jax.random.key(1))
    )
    return float(losses.loss), shared.on_host(gradients)


def perturb(params):
    """Makes scales and biases differ from 1 and 0, and adapters from nothing."""

    def shift(path, p):
        wave = jax.numpy.sin(jax.numpy.arange(p.size, dtype=p.dtype)).reshape(p.shape)
        return p + 0.1 * wave if p.ndim <= 2 or "lora" in str(path) else 3 * p

    return jax.tree_util.tree_map_with_path(shift, params)


def of_model(options):
    return {name: options[name] for name in PARTS_OF_A_MODEL if name in options}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), ROWS)
def test_block_on_a_mesh_has_one_devices_numbers(name, mesh, options):
    loss, gradients = run(name, mesh="1x1", **of_model(options))
    got, got_gradients = run(name, mesh=mesh, **options)
    assert abs(got / loss - 1) < 1e-6
    assert worst_leaf(got_gradients, gradients) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_block_on_one_device_has_the_plain_models_numbers(name):
    loss, gradients = run(name, mesh="1x1")
    expected, expected_gradients = compute_plainly(name, shared.tiny(mesh="1x1", **BLOCKS[name]))
    assert abs(loss / expected - 1) < 1e-6
    assert worst_leaf(gradients, expected_gradients) < 1e-5


def compute_plainly(name, config):
    """Runs operation by operation: to compile each configuration takes three times longer."""
    batch = shared.batch()
    params = shared.on_host(perturb(shared.initial_state(mesh="1x1", **BLOCKS[name]).params))

    def objective(params):
        return reference.loss(config, params, batch["tokens"], batch["targets"])[::-1]

    (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(params)
    return float(loss), shared.on_host(gradients)


WRONG = [
    ("qwen", {"qk_norm": "none"}), ("gemma", {"logits_cap": None}), ("gemma", {"embed_scale": 1.0}),
    ("gemma", {"norm": "rmsnorm"}), ("gemma", {"activation": "swiglu"}), ("gemma", {"qk_norm": "none"}),
    ("olmo", {"qk_norm": "none"}), ("bloom", {"positions": "none"}), ("bloom", {"embed": "plain"}),
    ("granite", {"embed_scale": 1.0}), ("granite", {"residual_scale": 1.0}), ("granite", {"logits_scale": 1.0}),
    ("granite", {"rotary_scaling": "longrope:16,1.5,1,1.2,2,4"}), ("cohere", {"window_pattern": "fw"}),
    ("cohere", {"window": 4}), ("cohere", {"norm": "rmsnorm"}), ("cohere", {"rotary_scaling": ""}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), WRONG)
def test_each_key_changes_the_plain_models_numbers(name, changes):
    gradients = run(name, mesh="1x1")[1]
    _, wrong = compute_plainly(name, shared.tiny(mesh="1x1", **BLOCKS[name] | changes))
    assert asserts.relative(gradients["transformer/layers"]["v"], wrong["transformer/layers"]["v"]) > 1e-3
