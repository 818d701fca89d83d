"""Each field of config.json, changed alone, changes our logits as it changes transformers', or is rejected.

Needs transformers and torch (pip install transformers torch).
"""

import dataclasses
import json
import shutil
import zlib

import jax
import numpy as np
import pytest

from shardformer.convert import families, hf_settings
from shardformer.convert.families.hf_llama import read_settings
from shardformer.errors import RunError, UsageError
from shardformer.model import Decoder
from tests.convert import hf_models, test_hf
from tests.convert.hf_models import ALPHA, GROWING, LINEAR, YARN

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

CLOSE = 2e-5  # transformers' float32 differs from its float64 by up to 4e-6, more for larger logits
TOKENS = np.random.RandomState(2).randint(0, hf_models.VOCAB, (2, hf_models.SEQ)).astype(np.int32)
LAYERS = {"layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention"]]}
ROPE = {
    "rope_theta": [50.0], "partial_rotary_factor": [0.5], "original_max_position_embeddings": [12],
    "rope_scaling": [{"type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.0}],
}  # fmt: skip
GEMMA = ROPE | LAYERS | {"hidden_act": ["relu"], "sliding_window_pattern": [1, 2], "query_pre_attn_scalar": [2.5, 36]}
QWEN = ROPE | LAYERS | {"use_sliding_window": [True], "sliding_window": [5], "max_window_layers": [0, 1]}
LOCAL = {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}
OTHERS = {"rotary": [True], "norm_eps": [0.1], "head_dim": [8]}  # of other families
# Values in addition to those of `list_values`, and keys that the recorded files lack.
FURTHER = {
    "llama": ROPE | LAYERS | {"rope_interleaved": [True], "internal_version": ["7b-alpha"]},
    "qwen2": QWEN,
    "qwen3": QWEN,
    "mixtral": ROPE | {"sliding_window": [1, 5], "router_jitter_noise": [0.1], "num_local_experts": [3]},
    "qwen3_moe": QWEN
    | {"mlp_only_layers": [[0], [1], [0, 1], [1, 7]], "decoder_sparse_step": [2, 3, 0], "norm_topk_prob": [True]},
    "qwen2_moe": QWEN
    | {"mlp_only_layers": [[0], [2], [0, 2], []], "decoder_sparse_step": [2, 3], "qkv_bias": [False]}
    | {"shared_expert_intermediate_size": [8]},
    "olmoe": ROPE | {"clip_qkv": [0.1], "attention_bias": [True], "head_dim": [4, 8]},
    "olmo2": ROPE | {"clip_qkv": [1.0]},
    "olmo3": LAYERS
    | {
        "clip_qkv": [1.0],
        "rope_theta": [50.0],
        "rope_scaling": [{"rope_type": "linear", "factor": 3.0}],
        "rope_parameters": [None, LOCAL],
        "sliding_window": [3],
    },
    "phi": ROPE | {"qk_layernorm": [True], "head_dim": [8], "hidden_act": ["gelu_fast"]},
    "ministral": ROPE | LAYERS | {"attention_bias": [True], "mlp_bias": [True], "sliding_window": [1]},
    "starcoder2": ROPE | LAYERS | {"use_bias": [False], "head_dim": [8], "sliding_window": [None, 1]},
    "gemma": ROPE
    | {"hidden_activation": ["relu"], "use_bidirectional_attention": [True], "final_logit_softcapping": [1.0]},
    "stablelm": ROPE | {"qk_layernorm": [True]},
    "phi3": ROPE | {"sliding_window": [None, 5], "partial_rotary_factor": [0.5]},
    "smollm3": QWEN | {"no_rope_layers": [[0, 1], [1, 1], [1]], "no_rope_layer_interval": [1], "mlp_bias": [True]},
    "granite": ROPE | {"mlp_bias": [True], "residual_multiplier": [0], "head_dim": [8]},
    "olmo": ROPE | {"clip_qkv": [0.1], "rms_norm_eps": [1e-2]},
    "phi3_long": ROPE | {"original_max_position_embeddings": [23, 24], "full_attn_mod": [2], "rope_parameters": [None]},
    "falcon": ROPE | {"num_ln_in_parallel_attn": [1, 2], "num_kv_heads": [16, 1], "n_head": [8], "alibi": [True]},
    "falcon_multi_query": ROPE | {"num_ln_in_parallel_attn": [1, 2], "num_kv_heads": [2], "bias": [True]},
    "mpt": {"attn_config": [{"clip_qkv": 0.1}, {"softmax_scale": 0.5}, {"alibi_bias_max": 4}, {"alibi": False}]},
    "cohere": ROPE | {"use_qk_norm": [True], "logit_scale": [-1.0], "head_dim": [8]},
    "cohere2": ROPE | LAYERS | {"sliding_window": [None, 1], "sliding_window_pattern": [1, 2]},
    "openai_gpt": OTHERS | {"n_inner": [64], "scale_attn_weights": [False]},
    "opt": OTHERS | {"do_layer_norm_before": [False], "word_embed_proj_dim": [16]},
    "opt_350m": OTHERS | {"do_layer_norm_before": [True], "word_embed_proj_dim": [8, 32]},
    "bloom": {"n_embed": [64], "n_inner": [64], "num_attention_heads": [8], "hidden_dropout": [0.1]},
    "gpt_neo": {"attention_types": [[[["local"], 2]], [[["global"], 2]], [[["local"], 3]]], "rotary": [True]},
    "mistral": ROPE
    | LAYERS
    | {"attention_bias": [True], "mlp_bias": [True], "sliding_window": [None, 1]}
    | {"document_attention": [True]},
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"rope_local_base_freq": [50.0], "rope_parameters": [None, LOCAL], "sliding_window": [None]},
}
FURTHER |= {
    "codegen": {"rotary_dim": [4, None], "n_head": [4, 2], "tie_word_embeddings": [True], "n_inner": [None]}
    | {"scale_attn_weights": [False], "rotary": [False], "activation_function": ["mish", "tanh"]},
    "gpt_bigcode": {"multi_query": [False], "n_inner": [None], "num_key_value_heads": [8, 2], "hidden_size": [64]}
    | {"attention_softmax_in_fp32": [False], "max_position_embeddings": [30], "scale_attn_weights": [False]}
    | {"add_cross_attention": [True], "activation_function": ["mish", "tanh", "quick_gelu"]},
    "exaone4": ROPE | LAYERS | {"sliding_window": [None, 1], "sliding_window_pattern": [1, 2, "LG"], "head_dim": [8]},
    "exaone": ROPE | {"attention_bias": [True], "num_layers": [1], "activation_function": ["relu"]},
    "internlm3": ROPE | {"qkv_bias": [True], "bias": [True], "pretraining_tp": [2]},
    "iquestcoder": ROPE | {"clip_qkv": [1.0], "use_sliding_window": [True]},
    "arcee": ROPE | {"attention_bias": [True], "mlp_bias": [True]},
    "nemotron": ROPE | {"rope_parameters": [None], "mlp_bias": [True], "head_dim": [8]},
    "jais2": ROPE | {"attention_bias": [False], "mlp_bias": [False], "rms_norm_eps": [1e-2]},
    "seed_oss": ROPE | {"attention_out_bias": [True], "mlp_bias": [True], "residual_dropout": [0.5]},
    "ernie4_5": ROPE | {"use_bias": [True], "attention_bias": [True]},
    "ernie4_5_moe": ROPE
    | {"use_bias": [True], "moe_norm_min": [0.9], "moe_num_shared_experts": [0, 1], "moe_layer_interval": [2, 0]}
    | {"moe_layer_start_index": [0, 2], "moe_layer_end_index": [0, -1], "num_experts": [8], "num_experts_per_tok": [1]},
    "helium": ROPE | {"attention_bias": [True], "mlp_bias": [True]},
    "glm": ROPE | {"rope_parameters": [None], "mlp_bias": [True]},
    "glm4": ROPE | {"rope_parameters": [None], "mlp_bias": [True]},
    "cwm": ROPE | LAYERS | {"sliding_window": [None, 1], "rope_parameters": [None], "attention_bias": [True]},
    "granitemoe": ROPE | {"num_local_experts": [3], "head_dim": [8], "norm_topk_prob": [True]},
    "granitemoeshared": ROPE | {"shared_intermediate_size": [0, 8], "num_local_experts": [3]},
    "hyperclovax": ROPE | {"use_post_norm": [False], "attention_multiplier": [None], "logits_scaling": [-1.0]},
    "vaultgemma": GEMMA,
    "glm4_moe": ROPE
    | {"n_group": [2], "topk_group": [2], "first_k_dense_replace": [0, 2], "use_qk_norm": [False]}
    | {"n_shared_experts": [1], "n_routed_experts": [3], "num_nextn_predict_layers": [2]},
    "dots1": ROPE
    | {"n_group": [2], "max_window_layers": [1], "sliding_window": [None, 5], "layer_types": [None]}
    | {"moe_layer_freq": [2], "n_shared_experts": [1], "first_k_dense_replace": [1, 2]},
    "solar_open": ROPE | {"n_group": [2], "n_shared_experts": [1], "first_k_dense_replace": [1]},
    "exaone_moe": ROPE
    | LAYERS
    | {"mlp_layer_types": [None, ["dense"] * 2, ["sparse", "dense"]], "sliding_window_pattern": [1, "LG"]}
    | {"sliding_window": [None]}
    | {"num_shared_experts": [2], "n_group": [2], "norm_topk_prob": [False]},
    "minimax_m2": ROPE | {"rotary_dim": [None, 8], "use_qk_norm": [False], "num_local_experts": [3]},
    "gpt_oss": ROPE
    | LAYERS
    | {"num_local_experts": [3], "sliding_window": [None, 1], "swiglu_limit": [0.1], "num_key_value_heads": [None, 8]}
    | {"rope_parameters": [None, {"rope_type": "default"}], "experts_per_token": [1], "initial_context_length": [12]}
    | {"layer_types": [None, ["full_attention"] * 2], "hidden_act": ["relu"]},
    "deepseek_v2": ROPE
    | {
        "n_group": [2],
        "topk_method": ["group_limited_greedy"],
        "q_lora_rank": [12],
        "head_dim": [8],
        "mlp_bias": [True],
    }
    | {"norm_topk_prob": [True], "num_key_value_heads": [None, 4], "first_k_dense_replace": [0, 2]},
    "deepseek_v3": ROPE
    | {"n_group": [1, 2], "topk_group": [1, 4], "rope_interleave": [False], "q_lora_rank": [None], "head_dim": [8]}
    | {"num_key_value_heads": [None, 4], "first_k_dense_replace": [0, 2], "num_nextn_predict_layers": [2]},
    "glm4_moe_lite": ROPE
    | {"n_group": [1, 2], "topk_group": [1, 5], "rope_interleave": [False], "q_lora_rank": [None], "head_dim": [8]}
    | {"mlp_layer_types": [None, ["sparse"] * 2, ["dense"] * 2, ["sparse", "dense"]], "attention_bias": [True]}
    | {"num_key_value_heads": [4], "first_k_dense_replace": [0, 1], "num_nextn_predict_layers": [2]},
    "sarvam_mla": ROPE
    | {"n_group": [2], "topk_group": [2], "rope_interleave": [False], "q_lora_rank": [12], "head_dim": [20]}
    | {"num_key_value_heads": [None, 4], "first_k_dense_replace": [0, 2], "num_experts": [8], "q_head_dim": [10, 3]}
    | {"rope_scaling": [{"type": "deepseek_yarn", "factor": 3.0, "mscale": 0.7, "mscale_all_dim": 0.9}]},
    "ministral3": {
        "rope_parameters": [
            None,
            GROWING | {"llama_4_scaling_beta": 0.2},
            GROWING | {"mscale": 0.3},
            GROWING | {"mscale_all_dim": 0.0},
            GROWING | {"factor": 8.0},
            GROWING | {"max_position_embeddings": 50},
            {"rope_type": "default"},
            GROWING | {"original_max_position_embeddings": 4},
            GROWING | {"rope_theta": 50.0},
        ],
        "sliding_window": [1, 5],
        "layer_types": [["sliding_attention"] * 2],
        "attention_bias": [True],
    },
    "mistral4": {
        "rope_parameters": [
            None,
            GROWING | {"llama_4_scaling_beta": 0.2},
            GROWING | {"mscale": 0.3},
            GROWING | {"mscale_all_dim": 0.9},
            GROWING | {"factor": 8.0},
            GROWING | {"partial_rotary_factor": 0.4},
            GROWING | {"partial_rotary_factor": 0.8},
            {"rope_type": "default"},
            GROWING | {"original_max_position_embeddings": 4},
            GROWING | {"rope_theta": 50.0},
        ],
        "n_group": [2],
        "topk_group": [2],
        "rope_interleave": [False],
        "q_lora_rank": [None],
        "head_dim": [10, 8],
        "num_key_value_heads": [None, 4],
        "first_k_dense_replace": [0, 2],
        "attention_bias": [True],
        "num_nextn_predict_layers": [2],
        "n_shared_experts": [1],
        "n_routed_experts": [8],
        "topk_method": ["greedy"],
    },
    "hunyuan_v1_dense": ROPE
    | {"use_qk_norm": [False], "attention_bias": [True], "use_cla": [True], "num_key_value_heads": [None, 2]}
    | {"rope_parameters": [None, YARN, {"rope_theta": 50.0} | ALPHA, {"rope_theta": 50.0, "alpha": 3.0} | LINEAR]},
    "xglm": {"scale_embedding": [False], "tie_word_embeddings": [False], "activation_function": ["mish", "tanh"]}
    | {"activation_dropout": [0.1], "num_attention_heads": [4], "rotary": [True], "norm_eps": [0.1]}
    | {"hidden_size": [64], "num_hidden_layers": [1]},
    "biogpt": OTHERS
    | {"scale_embedding": [False], "tie_word_embeddings": [False], "hidden_act": ["mish", "tanh"]}
    | {"activation_dropout": [0.1], "layer_norm_eps": [0.1]},
    "hy_v3": ROPE
    | {"num_shared_experts": [0, 1], "mlp_layer_types": [["sparse"] * 2, ["dense"] * 2, ["sparse"]]}
    | {"num_local_experts": [8], "num_nextn_predict_layers": [1], "norm_topk_prob": [False], "n_group": [2]}
    | {"attention_bias": [True], "mlp_bias": [True], "route_norm": [False]},
    "aria_text": ROPE
    | {"attention_bias": [True], "mlp_bias": [True], "moe_num_shared_experts": [1], "num_experts_per_tok": [1]},
    "mellum": {"layer_types": [None, ["full_attention"] * 3, ["sliding_attention"]], "rope_theta": [50.0]}
    | {"mlp_layer_types": [None, ["sparse", "dense", "sparse"], ["dense"] * 3, ["sparse"]]}
    | {"rope_parameters": [None, LOCAL, {"full_attention": YARN}, {"full_attention": YARN | {"truncate": False}}]}
    | {"sliding_window": [None, 1], "num_local_experts": [8], "num_mtp_layers": [1], "attention_bias": [True]}
    | {"rope_scaling": [LINEAR], "decoder_sparse_step": [2], "mlp_only_layers": [[1]], "head_dim": [4]},
    "youtu": ROPE
    | {"rope_interleave": [False], "q_lora_rank": [None], "head_dim": [8], "num_key_value_heads": [None, 4]}
    | {"attention_bias": [True], "mlp_bias": [True], "n_routed_experts": [4]},
    "flex_olmo": ROPE | {"clip_qkv": [0.1], "head_dim": [4, 8], "norm_topk_prob": [True]},
}
FURTHER["llama4"] = ROPE | {
    "layer_types": [None, ["chunked_attention"] * 3, ["full_attention"] * 3, ["full_attention"]],
    "no_rope_layers": [None, [1, 1, 1], [0, 1, 1], [1]],
    "moe_layers": [None, [0], [0, 1, 2], [1, 7], []],
    "interleave_moe_layer_step": [1],
    "attention_chunk_size": [None, 1],
    "no_rope_layer_interval": [2],
    "attn_scale": [0.0],
    "num_local_experts": [3],
}
WRAPPER_OF = {
    "llama4 in a wrapper": "Llama4",
    "gemma3 in a wrapper": "Gemma3",
    "mistral in a wrapper": "Mistral3",
    "ministral3 in a wrapper": "Mistral3",
}
FURTHER |= {name: FURTHER[name.split()[0]] for name in WRAPPER_OF}
FURTHER["gemma3 in a wrapper"] = FURTHER["gemma3"] | {"final_logit_softcapping": [1.0]}
OF_WRAPPER = {
    "Gemma3": {
        "tie_word_embeddings": [False], "final_logit_softcapping": [1.0], "image_token_index": [7],
        "mm_tokens_per_image": [2], "audio_config": [{"a": 1}], "vocab_size": [70],
    },
    "Llama4": {
        "tie_word_embeddings": [True], "image_token_index": [7], "boi_token_index": [7], "vocab_size": [70],
        "audio_config": [{"a": 1}],
    },
    "Mistral3": {
        "tie_word_embeddings": [False, True], "image_token_index": [7], "spatial_merge_size": [2],
        "audio_config": [{"a": 1}], "vocab_size": [70], "sliding_window": [3], "projector_hidden_act": ["relu"],
        "vision_feature_layer": [0], "multimodal_projector_bias": [True],
    },
}  # fmt: skip
HEADS = ("lm_head.weight", "output_projection.weight")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu")


def read_base(name: str) -> dict:
    """Returns a recorded config.json without its dtype, in which transformers would round Gemma's factor."""
    base = json.loads((hf_models.FOLDER / name.split()[0] / "config.json").read_text())
    return {key: value for key, value in base.items() if key != "dtype"}


def list_values(key: str, value) -> list:
    """Returns other values of the type of a value."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [2 * value + 0.125]
    if value is None:
        return [True, 3]
    if isinstance(value, str):
        return [kind for kind in ACTIVATIONS if kind != value] if "activ" in key or "act" in key else ["other"]
    return []


def compute_theirs(folder):
    """Writes weights for a config.json; returns transformers' logits, or None if transformers rejects the file."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = hf_models.build(config)
    except Exception:
        return None
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        random = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.1 * random if parameter.ndim == 1 else 0.6 * random * parameter.shape[-1] ** -0.5
    left_out = HEADS if config.tie_word_embeddings else ()
    stored = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(left_out)}
    # transformers joins experts, and names EXAONE's arrays as Llama's, in memory, not in its files.
    if config.model_type == "exaone" or any(".experts." in name for name in stored):
        model.save_pretrained(folder / "saved")
        shutil.copy(folder / "saved" / "model.safetensors", folder)
    else:
        tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
        safetensors.save_file(tensors, folder / "model.safetensors")
    try:
        return hf_models.compute(model, TOKENS)
    except Exception:
        return None


def compute_ours(folder, models: dict):
    """Returns our logits, or None if the folder is rejected. models: compiled models by configuration."""
    try:
        config = hf_settings.read_config(folder)[1].replace(mesh="1x1", batch=2)
        params = test_hf.params_of(folder)
    except (UsageError, RunError):
        return None
    if config not in models:
        ours = test_hf.Model.on(config, test_hf.mesh.make(config))
        models[config] = ours, jax.jit(Decoder(ours).logits)
    ours, logits = models[config]
    return np.asarray(logits(test_hf.on_devices(ours, params), TOKENS))[..., : config.model.vocab]


def compare(folder, models: dict) -> str:
    """Returns "same", "rejected" or "skipped", or the distance of the logits."""
    theirs = compute_theirs(folder)
    if theirs is None or not np.isfinite(theirs).all():
        return "skipped"
    ours = compute_ours(folder, models)
    if ours is None:
        return "rejected"
    if ours.shape != theirs.shape:
        return f"shape {ours.shape} instead of {theirs.shape}"
    distance = np.abs(ours - theirs).max()
    return "same" if distance <= CLOSE else f"{distance:.1e} off"


def list_files(name: str) -> dict[str, dict]:
    """Returns each changed config.json by the change."""
    base = read_base(name)
    files = {}
    for key in {**base, **FURTHER[name]}:
        if key in ("model_type", "architectures", "transformers_version"):
            continue
        for value in [*list_values(key, base.get(key)), *FURTHER[name].get(key, [])]:
            files[f"{key}={value}"] = base | {key: value}
    wrapper = WRAPPER_OF.get(name)
    if not wrapper:
        return files
    of_wrapper = {"model_type": wrapper.lower(), **hf_models.WRAPPERS[wrapper]}
    files = {change: of_wrapper | {"text_config": text} for change, text in files.items()}
    for key, values in OF_WRAPPER[wrapper].items():
        files |= {f"wrapper's {key}={value}": of_wrapper | {"text_config": base, key: value} for value in values}
    return files


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_each_field_is_followed_or_rejected(name, tmp_path):
    models: dict = {}
    found = {}
    for change, content in list_files(name).items():
        shutil.rmtree(tmp_path / "src", ignore_errors=True)
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "config.json").write_text(json.dumps(content))
        found[change] = compare(tmp_path / "src", models)
    print(json.dumps(found, indent=1))
    assert {field: outcome for field, outcome in found.items() if outcome[0].isdigit() or "shape" in outcome} == {}
    outcomes = list(found.values())
    assert min(outcomes.count("same"), outcomes.count("rejected")) >= 5


def test_a_field_that_is_not_followed_is_found(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(read_base("mistral")))
    assert compare(tmp_path, {}) == "same"
    without_window = dataclasses.replace(families.FAMILIES["mistral"], read=read_settings)
    monkeypatch.setitem(families.FAMILIES, "mistral", without_window)
    assert compare(tmp_path, {}).endswith("off")
