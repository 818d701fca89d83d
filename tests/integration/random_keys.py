"""Random configurations over every key that changes the program of a step, on meshes of up to 64 devices."""

import numpy as np

from shardformer.config import Config
from shardformer.config.parsing import parse_mesh
from tests import shared

MESHES = (
    "2x1", "4x2", "2x4", "1x8", "8x8", "16x4", "64x1", "1x2x2", "2x2x2", "4x4x4", "8x1x2", "dp2.cp2.mp2", "cp8",
    "dp4.cp2.mp8", "dp2.cp4.mp2.pp2", "cp4.pp2", "dp2.cp2.mp4",
)  # fmt: skip
# Values of keys, each drawn with the same chance, and as often the default.
MODEL = {
    "kv_heads": (1, 2, 4), "head_dim": (6,), "d_ff": (48,), "norm_eps": (1e-2,), "vocab": (57,),
    "activation": ("gelu_exact", "relu", "silu", "swiglu", "geglu", "clamped_swiglu"),
    "block": ("parallel_two_norms", "sequential", "sequential_four_norms", "sequential_post_norms"),
    "norm": ("rmsnorm", "rmsnorm_plus_one", "plain_layernorm"), "qk_norm": ("head", "all", "rotated_head"),
    "bias": ("none", "all_but_qkv", "all", "attention", "qkv", "norm", "qkv_norm"), "head_bias": (False,),
    "positions": ("learned", "sinusoids", "t5", "alibi", "none"), "rotary_dims": (2,), "rotary_theta": (50.0,),
    "rotary_scaling": (
        "linear:4", "yarn:4,0.5,3,12,1.5", "yarn_untruncated:4,0.5,3,12,1.5", "longrope:8,1.5,1,1.2,2,4",
    ),
    "attention_scale": (0.3,), "sinks": (True,),
    "attention_cap": (0.8,), "window": (5,), "window_pattern": ("wf", "wwf", "wn"), "window_rotary_theta": (20.0,),
    "embed": ("bias", "norm"), "embed_scale": (None, 2.0), "residual_scale": (0.6,), "logits_scale": (0.4,),
    "logits_cap": (2.0,), "tied": (True,),
}  # fmt: skip
COMPUTATION = {
    "zero": (1, 3), "pipeline_rounds": (2,), "dtype": ("bfloat16",), "grad_dtype": ("bfloat16",),
    "sequence_parallel": (True,), "attention": ("plain", "blocks"), "context_parallel": ("ring", "gather"),
    "loss_chunk": (5,), "scan": (False,), "remat": ("attention", "dots", "full"),
}  # fmt: skip
TRAINING = {
    "dropout": (0.2,), "z_loss": (0.01,), "accum": (2, 4), "accum_mode": ("multisteps", "manual"), "ema": (0.5,),
    "documents": ("masked", "padded"), "skip_steps": (5.0,),
}  # fmt: skip
OPTIMIZER = {
    "optimizer": ("muon", "normuon", "lbfgs"), "schedule": ("wsd", "linear", "constant"), "weight_decay": (0.0,),
    "lr_rules": ("*bias=10x,embed=frozen",), "clip": (0.0, 0.1), "param_dtype": ("bfloat16",),
    "offload": ("optimizer",), "beta1": (0.5,),
}  # fmt: skip
EXPERTS = {
    "experts_per_token": (1, 3), "expert_width": (8,), "shared_width": (16,), "shared_gate": (True,),
    "expert_bias": (True,), "router": ("sigmoid",), "router_norm": (False,), "balance_loss": (0.1,),
    "router_z_loss": (0.01,), "balance_rate": (0.01,), "expert_axes": ("mp", "dp"), "dense_first": (1,),
    "expert_pattern": ("de", "ed"),
}  # fmt: skip
ADAPTERS = {
    "lora_targets": ("q,o", "v:3,up,down:1:4", "q,expert_up,expert_down"), "lora_alpha": (4.0,),
    "lora_dropout": (0.3,), "rslora": (True,), "weights": ("int8", "int4", "nf4"),
}  # fmt: skip
OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo", "grpo", "distill")
OF_ANSWERS = ("dr_grpo", "gspo", "rloo")
PREFERENCES = {
    "beta": (0.3,), "label_smoothing": (0.1,), "length_norm": (True,), "reward_gap": (1.0,), "sft_weight": (0.4,),
    "sft_tokens": ("all",),
}  # fmt: skip
REWARDS = {"token_mean": ("answer",), "rollout_steps": (2,), "clip_ratio": (0.4,), "beta": (0.0, 0.3)}
DISTILLATION = {"divergence": ("reverse",), "distill_weight": (0.6,), "distill_temperature": (2.0,)}


def draw_keys(seed: int, teacher: str) -> dict:
    """Returns keys, which rules may reject together; `teacher` is the folder of the teacher of objective=distill."""
    draw = np.random.default_rng(seed)

    def choose(values):
        return values[draw.integers(len(values))]

    def choose_some(table, share=0.3):
        return {name: choose(values) for name, values in table.items() if draw.random() < share}

    sizes = parse_mesh(mesh := MESHES[seed % len(MESHES)])
    keys = {"mesh": mesh, "seq": 32 if sizes.cp > 1 else 16} | choose_some(MODEL, 0.25)
    keys |= choose_some(COMPUTATION) | choose_some(TRAINING, 0.2)
    keys |= choose_some(OPTIMIZER, 0.12)
    if draw.random() < 0.3:
        keys |= {"experts": choose((4, 8)), "bias": choose(("none", "norm"))} | choose_some(EXPERTS)
        keys["d_ff"] = 16
    if draw.random() < 0.25:
        keys |= {"lora_rank": 2} | choose_some(ADAPTERS)
    if draw.random() < 0.4:
        keys |= {"objective": choose(OBJECTIVES)}
        if keys["objective"] == "grpo":
            keys |= {"group_size": 2, "answer_tokens": 8} | choose_some(REWARDS)
        elif keys["objective"] == "distill":
            keys |= {"teacher": teacher} | choose_some(DISTILLATION)
        else:
            keys |= choose_some(PREFERENCES)
    # Most meshes would be rejected without the batch and the layers that they need.
    if draw.random() < 0.95:
        keys["accum"] = max(keys.get("accum", 1), sizes.pp)
        rows = sizes.dp * sizes.pp * keys["accum"]
        keys |= {"batch": max(rows, 4), "layers": sizes.pp * keys.get("pipeline_rounds", 1 + (sizes.pp == 1))}
    if sizes.pp == 1:
        keys.pop("pipeline_rounds", None)
    if sizes.cp == 1:
        keys.pop("context_parallel", None)
    # Drawn last: the other keys of a seed stay as they were.
    if keys.get("objective") == "grpo" and draw.random() < 0.6:
        keys["objective"] = choose(OF_ANSWERS)
    if "lora_rank" not in keys and draw.random() < 0.15:
        keys |= {"quantize_aware": choose(("int8", "int4", "nf4")), "quantize_after": seed % 2}
    if keys.get("objective") == "simpo" and draw.random() < 0.6:
        keys |= {"objective": "reward", "reward_center": choose((0.0, 0.2))}
        for name in ("loss_chunk", "logits_scale", "logits_cap", "tied"):  # of logits
            keys.pop(name, None)
    if keys.get("objective") == "orpo" and draw.random() < 0.6:
        keys |= {"objective": "mtp", "mtp_weight": choose((0.1, 0.3))}
    if draw.random() < 0.15:
        keys |= {"block": "sequential_sum_norms"} | choose_some({"embed_dim": (24,)}, 0.7)
    if keys.get("positions", "rotary") != "rotary":  # commands reject it
        keys.pop("rotary_scaling", None)
    if draw.random() < 0.2:
        keys["previous_tokens"] = choose((1, 3))
    if "window" in keys and draw.random() < 0.4:
        keys["window_chunks"] = True
    if "experts" in keys and draw.random() < 0.3:
        keys["gate_inputs"] = True
    if keys.get("positions", "rotary") == "rotary" and "kv_latent" not in keys:
        if draw.random() < 0.1:
            keys["qk_norm"] = "rotated_plain"
        if "n" in keys.get("window_pattern", "") and draw.random() < 0.5:
            keys |= {"query_growth": 0.5, "query_growth_tokens": choose((3, 5))}
    return keys


def make_config(keys: dict) -> Config:
    return shared.tiny(**keys)
