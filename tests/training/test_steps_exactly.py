"""Each feature on a mesh gives the loss and the gradients of the dense reference, in float64 to 1e-10."""

import pytest

from shardformer import exact
from shardformer.analysis import traced, verify_exact
from shardformer.layout import resolve
from shardformer.parallel.replicas import map_named
from tests import shared

# The reference unrolls its layers: a second one is only where layers may be mixed up.
SIZES = {"layers": 1, "d_model": 16, "heads": 4, "d_ff": 32, "seq": 8, "batch": 4, "z_loss": 0.1, "mesh": "2x2"}
LLAMA = {"block": "sequential", "norm": "rmsnorm", "bias": "none", "activation": "swiglu", "kv_heads": 2}
EXPERTS = {
    "experts": 4, "bias": "none", "activation": "swiglu", "balance_loss": 0.5, "router_z_loss": 0.1,
    "balance_rate": 0.1,
}  # fmt: skip
LATENT = LLAMA | {"kv_heads": None, "kv_latent": 12, "head_dim": 6, "rotary_dims": 2, "value_dim": 5}
ADAPTERS = {"lora_rank": 2, "lora_targets": "q,v:4:3,o,up:2:5,down", "bias": "none"}
ON_CP = {"mesh": "dp1.cp4.mp1"}
CASES = {
    "parallel": {"bias": "all", "accum": 2, "zero": 1, "clip": 0.5},
    "two_norms": {
        "layers": 2, "block": "parallel_two_norms", "bias": "all", "zero": 3, "tied": True, "vocab_multiple": 8,
    },
    "dropout": {"layers": 2, "dropout": 0.3, "block": "sequential", "accum": 2},
    "sequence_parallel": {"positions": "learned", "dropout": 0.3, "sequence_parallel": True, "previous_tokens": 2},
    "documents": {"positions": "learned", "documents": "masked", "mesh": "2x1"},
    "llama": LLAMA | {"layers": 2, "rotary_scaling": "llama3:2,1,4,8", "zero": 3},
    "grouped_queries": LLAMA | {"mesh": "2x1"},
    "blocks": LLAMA | {"mesh": "2x1", "attention": "blocks", "window": 5, "attention_cap": 2.0},
    "windows": LLAMA | {
        "layers": 2, "window": 5, "window_pattern": "wf", "window_rotary_theta": 100.0, "loss_chunk": 7,
    },
    "gemma": LLAMA | {
        "norm": "rmsnorm_plus_one", "embed_scale": None, "attention_cap": 2.0, "logits_cap": 3.0, "qk_norm": "all",
        "loss_chunk": 7, "residual_scale": 0.5, "logits_scale": 0.5,
    },
    "completep": LLAMA | {"layers": 2, "scale": "completep:8x1", "loss_chunk": 7},
    "alibi": {"positions": "alibi", "mesh": "1x4"},
    "t5": {"positions": "t5", "mesh": "1x4", "loss_chunk": 9, "bias": "all"},
    "ring": LLAMA | ON_CP | {"context_parallel": "ring", "documents": "masked"},
    "ring_windows": LLAMA | {"mesh": "dp2.cp2.mp2", "context_parallel": "ring", "window": 5, "zero": 3},
    "gather": LLAMA | ON_CP | {"context_parallel": "gather"},
    "previous_tokens": LLAMA | ON_CP | {"previous_tokens": 2, "documents": "masked", "embed_scale": 2.0},
    "sinks": LLAMA | {
        "layers": 2, "sinks": True, "bias": "attention", "window": 5, "window_pattern": "wf", "dropout": 0.3,
    },
    "sinks_blocks": LLAMA | {
        "sinks": True, "mesh": "1x4", "attention": "blocks", "rotary_scaling": "yarn_untruncated:4,0.5,3,12,1.5",
    },
    "sinks_ring": LLAMA | ON_CP | {"sinks": True, "context_parallel": "ring", "documents": "masked"},
    "sinks_gather": LLAMA | {"mesh": "dp2.cp2.mp1", "sinks": True, "context_parallel": "gather"},
    "latent": LATENT | {"q_latent": 10, "zero": 3, "rotary_scaling": "yarn:4,0.5,3,12,1.5", "attention_scale": 0.7},
    "latent_of_keys": LATENT | {"mesh": "1x4", "block": "parallel", "sequence_parallel": True, "dropout": 0.3},
    "latent_blocks": LATENT | {"mesh": "2x1", "q_latent": 10, "attention": "blocks", "documents": "masked"},
    "latent_ring": LATENT | ON_CP | {"context_parallel": "ring", "value_dim": 8},
    "latent_gather": LATENT | {"mesh": "dp2.cp2.mp1", "context_parallel": "gather"},
    "latent_int8": LATENT | {"layers": 2, "q_latent": 10, "lora_rank": 2, "lora_targets": "q,o", "weights": "int8"},
    "pipeline": {"mesh": "2x1x2", "accum": 2, "layers": 4, "pipeline_rounds": 2, "dropout": 0.3, "window": 5,
                 "window_pattern": "wf"},
    "pipeline_of_six": {"mesh": "1x1x2", "layers": 2, "accum": 6, "batch": 6, "previous_tokens": 1, "embed_dim": 12},
    "experts": EXPERTS | {"router": "sigmoid", "accum": 2, "shared_width": 8, "shared_gate": True},
    "experts_cp": EXPERTS | {"mesh": "dp2.cp2.mp1", "router_norm": False},
    "experts_dp": EXPERTS | {"layers": 2, "expert_axes": "dp", "zero": 3},
    "experts_sequence_parallel": EXPERTS | {
        "mesh": "1x2", "sequence_parallel": True, "shared_width": 8, "shared_gate": True, "layers": 2,
        "dense_first": 1, "block": "sequential",
    },
    "experts_groups": EXPERTS | {
        "experts": 8, "expert_groups": 4, "groups_per_token": 2, "experts_per_token": 3, "router": "sigmoid",
    },
    "experts_groups_softmax": EXPERTS | {
        "experts": 6, "expert_groups": 3, "groups_per_token": 1, "router_norm": False, "mesh": "1x4",
    },
    "latent_experts": LATENT | EXPERTS | {"q_latent": 10, "layers": 2, "dense_first": 1, "shared_width": 8},
    "experts_bias": EXPERTS | {"expert_bias": True, "activation": "clamped_swiglu", "zero": 1},
    "experts_weighed_first": EXPERTS | {"expert_bias": True, "gate_inputs": True, "mesh": "1x2"},
    "experts_bias_widths": EXPERTS | {"expert_bias": True, "experts": 3, "mesh": "1x4", "sequence_parallel": True},
    "experts_bias_dp": EXPERTS | {"expert_bias": True, "expert_axes": "dp", "zero": 3, "layers": 2, "dense_first": 1},
    "experts_adapters": EXPERTS | {"lora_rank": 2, "lora_targets": "q,expert_up:2:3,expert_down:4:7", "mesh": "1x2"},
    "adapters": ADAPTERS | {"lora_dropout": 0.3, "block": "sequential"},
    "int8": ADAPTERS | {"weights": "int8", "previous_tokens": 2},
    "int4": ADAPTERS | {"weights": "int4", "d_ff": 132},  # three groups on two shards
    "nf4": ADAPTERS | {"weights": "nf4", "zero": 3, "d_ff": 512},  # 256 scales of a shard share a scale
}  # fmt: skip


def dequantize(config, params):
    """Returns the parameters with the values that their codes and scales stand for."""
    weights = resolve(config).weights

    def read(name, leaf):
        if not config.stored.quantized or not weights.is_quantized(name):
            return leaf
        return exact.run(lambda w: weights.dequantize(name, weights.quantize(name, w)), leaf).outputs

    return map_named(read, params)


def list_differences(config) -> list[str]:
    """Returns the losses and gradients that differ from those of the reference."""
    trainer = traced.make_trainer(config)
    params, batch = verify_exact.draw_parameters(config), verify_exact.draw_batch(trainer)
    key = verify_exact.draw_key(config)
    got = verify_exact.compute_gradients(trainer, params, batch, key)
    expected = verify_exact.compute_dense(config.replace(weights="float"), dequantize(config, params), batch, key)
    rows = verify_exact.compare(got, expected, "")
    return [f"{row.name}: {row.relative:.1e}" for row in rows if not row.passes]


@pytest.mark.parametrize("case", CASES)
def test_mesh_equals_the_reference(case):
    assert list_differences(shared.tiny(**SIZES | CASES[case])) == []
