"""Small random models of Hugging Face's families, and what transformers computes with them. Needs transformers.

`python -m tests.convert.hf_models` writes goldens/hf: weights in bfloat16, logits in float32, a greedy continuation.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "goldens" / "hf"
SEQ, VOCAB, NEW = 24, 61, 8
GPT = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 8, "n_inner": 64}
GPT |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
HIDDEN = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": SEQ}
NEOX = HIDDEN | {"num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EVEN = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
EVEN |= {"original_max_position_embeddings": 12}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
FULL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0, "partial_rotary_factor": 1.0}
GROUPED = {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4}
GEMMA = HIDDEN | GROUPED | {"query_pre_attn_scalar": 9, "sliding_window": 5, "rms_norm_eps": 1e-5}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
QWEN = {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 12}
PARTLY = QWEN | {"hidden_size": 64, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}
PHI = QWEN | {"hidden_size": 64, "pad_token_id": 0, "eos_token_id": 1, "sliding_window": 5}
OPT = {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 64, "max_position_embeddings": SEQ, "dropout": 0.0}
OPT |= {"num_hidden_layers": 2, "num_attention_heads": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
ENDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
EIGHT = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
ROUTED = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2}
ROUTED |= {"moe_intermediate_size": 16, "routed_scaling_factor": 1.5}
LATENT = ENDS | {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 6, "v_head_dim": 8}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 8, "seq_length": SEQ}
FACTORS = {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.5}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1], "long_factor": [1.5, 3.0]}
FALCON = {"vocab_size": VOCAB, "hidden_size": 64, "ffn_hidden_size": 96, "num_hidden_layers": 2, "hidden_dropout": 0.0}
FALCON |= {"max_position_embeddings": SEQ} | ENDS
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 8, "max_seq_len": SEQ} | ENDS
GROWING = YARN | {"original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.5}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 10.0}
MODELS = {
    "gptj": ("GPTJ", GPT | {"n_embd": 64, "rotary_dim": 4}),
    "gpt2": ("GPT2", GPT),
    "gpt_neo": (
        "GPTNeo",
        HIDDEN | {"num_layers": 2, "num_heads": 8, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    ),
    "neox_parallel": (
        "GPTNeoX",
        NEOX
        | {
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "neox_sequential": (
        "GPTNeoX",
        NEOX | {"use_parallel_residual": False, "hidden_act": "gelu_new", "rope_parameters": FULL},
    ),
    "llama": (
        "Llama",
        HIDDEN | GROUPED | {"hidden_size": 64, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 12}},
    ),
    "mistral": ("Mistral", HIDDEN | GROUPED | {"sliding_window": 5, "rope_parameters": LINEAR}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "gemma3": (
        "Gemma3Text",
        GEMMA
        | {"layer_types": ["full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
    "qwen2": ("Qwen2", HIDDEN | QWEN | {"hidden_size": 64, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", HIDDEN | QWEN | {"head_dim": 6, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", HIDDEN | QWEN | {"hidden_size": 64, "rope_parameters": LINEAR}),
    "stablelm": ("StableLm", HIDDEN | PARTLY | {"use_qkv_bias": True}),
    "stablelm_parallel": ("StableLm", HIDDEN | PARTLY | {"num_attention_heads": 8, "use_parallel_residual": True}),
    "olmo3": (
        "Olmo3",
        HIDDEN
        | QWEN
        | ENDS
        | {"hidden_size": 64, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
    "phi": ("Phi", HIDDEN | PARTLY),
    "phi3": ("Phi3", HIDDEN | PHI),
    "ministral": (
        "Ministral",
        HIDDEN | GROUPED | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "starcoder2": (
        "Starcoder2",
        HIDDEN | QWEN | ENDS | {"hidden_size": 64, "sliding_window": 5, "rope_parameters": LINEAR},
    ),
    "gemma": ("Gemma", HIDDEN | GROUPED | {"rms_norm_eps": 1e-5, "rope_parameters": LINEAR}),
    "mixtral": (
        "Mixtral",
        HIDDEN | GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": LINEAR},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        HIDDEN
        | QWEN
        | {"head_dim": 6, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
        | {"norm_topk_prob": False},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        HIDDEN
        | QWEN
        | {"hidden_size": 64, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 24, "num_hidden_layers": 3, "mlp_only_layers": [1]}
        | {"rope_parameters": LINEAR},
    ),
    "olmoe": (
        "Olmoe",
        HIDDEN
        | QWEN
        | ENDS
        | {"hidden_size": 64, "intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 3}
        | {"rope_parameters": LINEAR},
    ),
    "openai_gpt": ("OpenAIGPT", {name: value for name, value in GPT.items() if name != "n_inner"}),
    "opt": ("OPT", OPT),
    "opt_350m": ("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "bloom": ("Bloom", BLOOM),
    "smollm3": (
        "SmolLM3",
        HIDDEN | QWEN | ENDS | {"hidden_size": 64, "no_rope_layers": [1, 0]},
    ),
    "granite": ("Granite", HIDDEN | QWEN | FACTORS | {"hidden_size": 64, "rope_parameters": LINEAR}),
    "olmo": ("Olmo", HIDDEN | QWEN | ENDS | {"hidden_size": 64, "rope_parameters": LINEAR}),
    "phi3_long": (
        "Phi3",
        HIDDEN
        | PHI
        | {"tie_word_embeddings": True, "sliding_window": None, "original_max_position_embeddings": 12}
        | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}, "num_attention_heads": 8},
    ),
    "falcon": ("Falcon", FALCON | {"num_attention_heads": 16, "num_kv_heads": 8, "new_decoder_architecture": True}),
    "falcon_multi_query": ("Falcon", FALCON | {"num_attention_heads": 8, "rope_parameters": LINEAR}),
    "mpt": ("Mpt", MPT),
    "cohere": ("Cohere", HIDDEN | QWEN | ENDS | {"hidden_size": 64, "logit_scale": 0.3, "rope_parameters": LINEAR}),
    "cohere2": (
        "Cohere2",
        HIDDEN
        | QWEN
        | ENDS
        | {"hidden_size": 64, "logit_scale": 0.5, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": LOCAL},
    ),
    "codegen": ("CodeGen", GPT | {"rotary_dim": 2}),
    "progen": ("CodeGen", GPT | {"n_embd": 64, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", GPT | {"n_embd": 64}),
    "exaone4": (
        "Exaone4",
        HIDDEN
        | QWEN
        | ENDS
        | {"hidden_size": 64, "sliding_window": 5, "rope_parameters": LINEAR}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone": ("Exaone", HIDDEN | QWEN | ENDS | {"hidden_size": 64, "rope_parameters": LINEAR}),
    "internlm3": ("InternLM3", HIDDEN | GROUPED | ENDS | {"rope_parameters": LINEAR}),
    "iquestcoder": ("IQuestCoder", HIDDEN | GROUPED | ENDS),
    "arcee": ("Arcee", HIDDEN | GROUPED | ENDS | {"rope_parameters": YARN}),
    "nemotron": ("Nemotron", HIDDEN | PARTLY | ENDS | {"num_attention_heads": 8}),
    "jais2": ("Jais2", HIDDEN | GROUPED | ENDS | {"rope_parameters": LINEAR}),
    "seed_oss": ("SeedOss", HIDDEN | GROUPED | ENDS | {"rope_parameters": LINEAR, "attention_dropout": 0.0}),
    "ernie4_5": ("Ernie4_5", HIDDEN | GROUPED | ENDS),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        HIDDEN
        | EIGHT
        | ENDS
        | {"num_hidden_layers": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "tie_word_embeddings": False},
    ),
    "helium": ("Helium", HIDDEN | QWEN | ENDS | {"hidden_size": 64, "head_dim": 4}),
    "glm": ("Glm", HIDDEN | PARTLY | ENDS | EIGHT),
    "glm4": ("Glm4", HIDDEN | PARTLY | ENDS | EIGHT),
    "cwm": (
        "Cwm",
        HIDDEN | GROUPED | ENDS | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "granitemoe": (
        "GraniteMoe",
        HIDDEN | QWEN | FACTORS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": LOCAL},
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        HIDDEN
        | QWEN
        | FACTORS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
        | {"rope_parameters": LOCAL},
    ),
    "hyperclovax": ("HyperCLOVAX", HIDDEN | QWEN | ENDS | FACTORS | {"hidden_size": 64, "rope_parameters": LINEAR}),
    "vaultgemma": ("VaultGemma", GEMMA | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "flex_olmo": (
        "FlexOlmo",
        HIDDEN | QWEN | ENDS | {"hidden_size": 64, "intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 3},
    ),
    "glm4_moe": ("Glm4Moe", HIDDEN | EIGHT | ENDS | ROUTED | {"first_k_dense_replace": 1, "use_qk_norm": True}),
    "dots1": ("Dots1", HIDDEN | QWEN | ENDS | ROUTED | {"hidden_size": 64, "max_window_layers": 2}),
    "solar_open": ("SolarOpen", EIGHT | ENDS | ROUTED | {"vocab_size": VOCAB, "max_position_embeddings": SEQ}),
    "exaone_moe": (
        "ExaoneMoe",
        HIDDEN
        | QWEN
        | ENDS
        | {"hidden_size": 64, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        HIDDEN
        | EIGHT
        | ENDS
        | {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"num_hidden_layers": 2, "rotary_dim": 4},
    ),
    "gpt_oss": (
        "GptOss",
        HIDDEN
        | EIGHT
        | ENDS
        | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
        | {"sliding_window": 5, "rope_parameters": YARN | {"truncate": False, "beta_fast": 1.5, "beta_slow": 0.25}},
    ),
    "deepseek_v2": ("DeepseekV2", HIDDEN | LATENT | ROUTED | {"first_k_dense_replace": 1, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        HIDDEN
        | LATENT
        | ROUTED
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 12}
        | {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.8}},
    ),
    "kimi_k2": (
        "DeepseekV3",
        HIDDEN | LATENT | ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        HIDDEN
        | LATENT
        | ROUTED
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "q_lora_rank": 12, "rope_parameters": LINEAR},
    ),
    "sarvam_mla": ("SarvamMLA", HIDDEN | LATENT | ROUTED | {"rope_parameters": YARN | {"mscale": 1.0}}),
    "youtu": ("Youtu", HIDDEN | LATENT | {"num_hidden_layers": 2, "q_lora_rank": 12, "pad_token_id": None}),
    "ministral3": (
        "Ministral3",
        HIDDEN | GROUPED | {"rope_parameters": GROWING | {"mscale": 1.0, "mscale_all_dim": 0.5}, "pad_token_id": 0},
    ),
    "mistral4": (
        "Mistral4",
        HIDDEN
        | LATENT
        | ROUTED
        | {"first_k_dense_replace": 1, "q_lora_rank": 12}
        | {"rope_parameters": GROWING | {"mscale": 1.5, "mscale_all_dim": 0.8}},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        HIDDEN | QWEN | ENDS | {"head_dim": 6, "rope_parameters": {"rope_theta": 100.0} | ALPHA},
    ),
    "xglm": (
        "XGLM",
        {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": 8, "ffn_dim": 64, "dropout": 0.0}
        | ENDS
        | {"max_position_embeddings": SEQ, "attention_dropout": 0.0},
    ),
    "biogpt": (
        "BioGpt",
        HIDDEN
        | ENDS
        | {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_dropout_prob": 0.0}
        | {"attention_probs_dropout_prob": 0.0},
    ),
    "hy_v3": (
        "HYV3",
        HIDDEN
        | EIGHT
        | ENDS
        | {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2}
        | {"moe_intermediate_size": 16, "router_scaling_factor": 1.5, "rope_parameters": LINEAR},
    ),
    "mellum": (
        "Mellum",
        HIDDEN
        | EIGHT
        | ENDS
        | {"num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}},
    ),
    "aria_text": (
        "AriaText",
        HIDDEN
        | QWEN
        | ENDS
        | {"hidden_size": 64, "intermediate_size": 16, "moe_num_experts": 4, "moe_topk": 2, "rope_parameters": LINEAR},
    ),
    "llama4": (
        "Llama4Text",
        HIDDEN
        | EIGHT
        | ENDS
        | {"intermediate_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_hidden_layers": 3}
        | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 5}
        | {"floor_scale": 4, "attn_scale": 0.8, "rope_parameters": EVEN},
    ),
}
# What their publishers' config.json has, of types that transformers does not know.
OTHER_TYPES = {
    "progen": {"model_type": "progen", "architectures": ["ProGenForCausalLM"]},
    "kimi_k2": {"model_type": "kimi_k2"},
}
# With larger weights, transformers' float32 logits of these models would differ from its float64 logits by 1.9e-6.
ROUNDED_BY_TRANSFORMERS = ("llama", "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "olmo2", "stablelm", "phi3")
ROUNDED_BY_TRANSFORMERS += ("llama4", "olmo3", "phi", "ministral", "starcoder2", "gemma", "smollm3", "granite", "olmo")
ROUNDED_BY_TRANSFORMERS += ("phi3_long", "falcon", "falcon_multi_query", "mpt", "cohere", "cohere2")
ROUNDED_BY_TRANSFORMERS += ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe")
ROUNDED_BY_TRANSFORMERS += ("exaone4", "exaone", "internlm3", "iquestcoder", "arcee", "nemotron", "jais2", "seed_oss")
ROUNDED_BY_TRANSFORMERS += ("ernie4_5", "helium", "glm", "glm4", "cwm", "granitemoe", "granitemoeshared", "flex_olmo")
ROUNDED_BY_TRANSFORMERS += ("hyperclovax", "vaultgemma", "gpt_bigcode", "codegen", "progen")
ROUNDED_BY_TRANSFORMERS += ("glm4_moe", "dots1", "solar_open", "exaone_moe", "minimax_m2", "gpt_oss")
ROUNDED_BY_TRANSFORMERS += ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "sarvam_mla")
ROUNDED_BY_TRANSFORMERS += ("youtu", "ministral3", "mistral4", "hunyuan_v1_dense", "xglm", "biogpt")
ROUNDED_BY_TRANSFORMERS += ("ernie4_5_moe", "hy_v3", "mellum", "aria_text")
ADDS_ONE_TO_SCALES = ("gemma", "vaultgemma", "nemotron")
# Further settings of a family, which are compared where transformers is installed.
SHARED = {"num_key_value_heads": 1, "num_attention_heads": 8, "hidden_size": 48}
GROUPS_OF_THREE = {"num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 36}
SETTINGS = {
    "llama": (
        {"rope_parameters": YARN, "tie_word_embeddings": True},
        SHARED
        | {"head_dim": 6, "rope_parameters": YARN | {"beta_fast": 3.0, "beta_slow": 0.5, "attention_factor": 0.75}},
        GROUPS_OF_THREE | {"rope_parameters": LINEAR, "rms_norm_eps": 1e-2},
    ),
    "qwen2": (
        {"rope_parameters": None, "tie_word_embeddings": True},
        SHARED | {"rope_parameters": LINEAR, "max_window_layers": 1},
        GROUPS_OF_THREE | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 12}, "rms_norm_eps": 1e-2},
    ),
    "qwen3": (
        SHARED | {"head_dim": 10, "tie_word_embeddings": False},
        {"rope_parameters": YARN, "head_dim": 4, "hidden_size": 64},
        GROUPS_OF_THREE | {"head_dim": 2, "rope_parameters": LINEAR, "rms_norm_eps": 1e-2},
    ),
    "mixtral": (
        {"num_local_experts": 8, "num_experts_per_tok": 1, "sliding_window": 5, "tie_word_embeddings": True},
        {"num_local_experts": 3, "num_experts_per_tok": 3, "rope_parameters": YARN},
        GROUPS_OF_THREE | {"num_local_experts": 5, "rms_norm_eps": 1e-2},
    ),
    "qwen3_moe": (
        {"mlp_only_layers": [1], "tie_word_embeddings": True},
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "num_experts": 8, "norm_topk_prob": True},
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [0, 3], "rope_parameters": YARN},
    ),
    "qwen2_moe": (
        {"mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": True},
        {"num_hidden_layers": 4, "mlp_only_layers": [0], "num_experts": 8, "num_key_value_heads": 1},
        GROUPS_OF_THREE | {"decoder_sparse_step": 2, "mlp_only_layers": None, "rms_norm_eps": 1e-2},
    ),
    "olmoe": (
        {"num_experts": 8, "num_experts_per_tok": 1, "tie_word_embeddings": True},
        {"num_key_value_heads": 16, "norm_topk_prob": True, "rope_parameters": YARN},
        GROUPS_OF_THREE | {"num_experts": 3, "rms_norm_eps": 1e-2},
    ),
    "olmo2": (
        SHARED | {"rope_parameters": None, "tie_word_embeddings": True},
        {"num_key_value_heads": 16, "rope_parameters": YARN},
        GROUPS_OF_THREE | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 12}, "rms_norm_eps": 1e-2},
    ),
    "olmo3": (
        SHARED | {"layer_types": ["sliding_attention"] * 2, "tie_word_embeddings": True},
        {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": YARN}},
        GROUPS_OF_THREE | {"layer_types": None, "sliding_window": 3, "rope_parameters": None, "rms_norm_eps": 1e-2},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}},
    ),
    "phi": (
        SHARED | {"rope_parameters": None, "hidden_act": "relu", "hidden_size": 64},
        {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "hidden_act": "gelu_fast"},
        GROUPS_OF_THREE | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}, "layer_norm_eps": 1e-2},
    ),
    "ministral": (
        {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
        {"layer_types": ["sliding_attention"] * 2, "rope_parameters": YARN, "num_key_value_heads": 1},
        {
            "sliding_window": 40,
            "rms_norm_eps": 1e-2,
            "head_dim": 6,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "hidden_size": 40,
        },
    ),
    "starcoder2": (
        {"use_bias": False, "sliding_window": None, "rope_parameters": None, "hidden_act": "gelu"},
        SHARED | {"tie_word_embeddings": False, "rope_parameters": YARN},
        GROUPS_OF_THREE | {"norm_epsilon": 1e-2, "sliding_window": 1},
    ),
    "gemma": (
        {"hidden_act": "gelu", "rope_parameters": None, "num_key_value_heads": 1},
        {"hidden_act": "silu", "tie_word_embeddings": False, "head_dim": 2},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6, "hidden_size": 36, "rms_norm_eps": 1e-2},
    ),
    "stablelm": (
        SHARED
        | {"use_parallel_residual": True, "tie_word_embeddings": True, "rope_parameters": None, "hidden_size": 80},
        {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "use_qkv_bias": False},
        GROUPS_OF_THREE | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}, "layer_norm_eps": 1e-2},
    ),
    "phi3": (
        SHARED | {"tie_word_embeddings": True, "sliding_window": None},
        {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}, "num_key_value_heads": 16},
        GROUPS_OF_THREE | {"rms_norm_eps": 1e-2, "sliding_window": 40},
    ),
    "smollm3": (
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "rope_parameters": YARN, "num_key_value_heads": 1},
        {"no_rope_layers": [0, 0], "tie_word_embeddings": False},
        GROUPS_OF_THREE | {"no_rope_layers": [0, 1], "rms_norm_eps": 1e-2, "rope_parameters": LINEAR},
    ),
    "granite": (
        SHARED | {"rope_parameters": YARN, "tie_word_embeddings": True, "embedding_multiplier": 1.0},
        {"attention_multiplier": 0.5, "logits_scaling": 1.0, "residual_multiplier": 1.0},
        GROUPS_OF_THREE | {"residual_multiplier": 1.5, "logits_scaling": 3.0, "rms_norm_eps": 1e-2},
    ),
    "olmo": (
        SHARED | {"rope_parameters": None, "tie_word_embeddings": True},
        {"num_key_value_heads": 16, "rope_parameters": YARN},
        GROUPS_OF_THREE | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 12}},
    ),
    "phi3_long": (
        {"original_max_position_embeddings": 24, "sliding_window": 5},
        {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5, "attention_factor": 1.5}},
        {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5, "factor": 32.0}, "num_key_value_heads": 1},
    ),
    "falcon": (
        {"num_ln_in_parallel_attn": 1, "rope_parameters": LINEAR, "tie_word_embeddings": False},
        {"num_kv_heads": 1, "activation": "gelu_new"},
        {"num_attention_heads": 9, "num_kv_heads": 3, "hidden_size": 36, "layer_norm_epsilon": 1e-2},
    ),
    "falcon_multi_query": (
        {"parallel_attn": False, "rope_parameters": YARN},
        {"multi_query": False, "activation": "relu"},
        {"multi_query": False, "parallel_attn": False, "num_attention_heads": 6, "hidden_size": 48},
    ),
    "mpt": (
        {"n_heads": 2, "d_model": 48, "tie_word_embeddings": False},
        {"n_heads": 16, "d_model": 64, "layer_norm_epsilon": 1e-2},
        {"n_heads": 1, "max_seq_len": 30},
    ),
    "cohere": (
        SHARED | {"tie_word_embeddings": False, "rope_parameters": YARN},
        {"rope_parameters": None, "logit_scale": 1.0},
        GROUPS_OF_THREE | {"layer_norm_eps": 1e-2, "logit_scale": 2.0},
    ),
    "cohere2": (
        {"layer_types": ["sliding_attention"] * 2, "rope_parameters": YARN},
        {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": False, "num_key_value_heads": 1},
        GROUPS_OF_THREE | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 1},
    ),
    "openai_gpt": (
        {"n_head": 2, "n_embd": 48, "afn": "silu", "tie_word_embeddings": False},
        {"afn": "relu", "layer_norm_epsilon": 1e-2},
        {"n_positions": 30, "afn": "swish"},
    ),
    "opt": (
        {"activation_function": "gelu_new", "tie_word_embeddings": False},
        {"num_attention_heads": 2, "hidden_size": 48, "word_embed_proj_dim": 48, "do_layer_norm_before": False},
        {"word_embed_proj_dim": 40, "tie_word_embeddings": False},
        {"ffn_dim": 40, "max_position_embeddings": 30, "activation_function": "gelu"},
    ),
    "bloom": (
        {"n_head": 12, "hidden_size": 48, "tie_word_embeddings": False},
        {"n_head": 16, "hidden_size": 64, "layer_norm_epsilon": 1e-2},
        {"n_head": 3, "hidden_size": 36, "seq_length": 30},
    ),
    "gpt_neo": (
        {"attention_types": [[["local"], 2]], "window_size": 1},
        {"attention_types": [[["local", "global"], 1]], "window_size": 40},
        {"attention_types": [[["global"], 2]], "activation_function": "relu"},
    ),
    "mistral": (
        {"sliding_window": None, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 12}},
        {"sliding_window": 40, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
        {"sliding_window": 1, "num_key_value_heads": 1, "head_dim": 6, "num_attention_heads": 5, "hidden_size": 40},
    ),
    "gemma2": (
        {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None, "hidden_activation": "silu"},
        {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": False, "head_dim": 2},
        {"sliding_window": 40, "rope_parameters": LINEAR, "num_key_value_heads": 1, "final_logit_softcapping": None},
    ),
    "gemma3": (
        {"layer_types": ["sliding_attention"] * 2, "final_logit_softcapping": 1.5, "tie_word_embeddings": False},
        {"layer_types": ["full_attention"] * 2, "rope_parameters": None, "hidden_activation": "silu"},
        {"layer_types": None, "sliding_window": 3, "num_key_value_heads": 1, "head_dim": 6, "rope_parameters": None},
    ),
    "codegen": (
        {"n_embd": 64, "rotary_dim": 8, "activation_function": "relu"},
        {"n_head": 4, "layer_norm_epsilon": 1e-2},
    ),
    "gpt_bigcode": (
        {"multi_query": False, "tie_word_embeddings": False},
        {"n_head": 6, "n_embd": 48, "activation_function": "relu"},
    ),
    "exaone4": (
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": YARN},
        {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True, "num_key_value_heads": 1},
        GROUPS_OF_THREE | {"layer_types": None, "sliding_window_pattern": 2, "rms_norm_eps": 1e-2},
        {"layer_types": ["sliding_attention"] * 2},
    ),
    "internlm3": (SHARED | {"head_dim": 6, "rope_parameters": YARN},),
    "iquestcoder": (SHARED | {"head_dim": 6, "rope_parameters": LINEAR},),
    "arcee": (SHARED | {"head_dim": 6, "tie_word_embeddings": True}, {"hidden_act": "gelu", "rope_parameters": None}),
    "nemotron": (
        SHARED | {"hidden_act": "silu", "tie_word_embeddings": True, "hidden_size": 64},
        {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "norm_eps": 1e-2},
        {"head_dim": 8, "rope_parameters": None},
    ),
    "jais2": (
        {"attention_bias": False, "mlp_bias": False, "hidden_act": "gelu_new", "rope_parameters": YARN},
        SHARED | {"head_dim": 6, "tie_word_embeddings": True, "layer_norm_eps": 1e-2},
    ),
    "seed_oss": (
        {"attention_bias": False, "rope_parameters": YARN},
        SHARED | {"head_dim": 6, "tie_word_embeddings": True},
    ),
    "ernie4_5": (
        {"rope_parameters": YARN, "tie_word_embeddings": False},
        SHARED | {"head_dim": 6, "rms_norm_eps": 1e-2, "rope_parameters": LINEAR},
    ),
    "ernie4_5_moe": (
        {"rope_parameters": YARN, "tie_word_embeddings": True, "num_hidden_layers": 4, "moe_layer_interval": 2},
        {"num_hidden_layers": 4, "moe_layer_end_index": 2, "moe_num_shared_experts": 1, "rope_parameters": LINEAR},
    ),
    "helium": ({"rope_parameters": YARN, "num_key_value_heads": 1, "tie_word_embeddings": True},),
    "glm": (
        {"attention_bias": False, "rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "head_dim": 6},
        SHARED | {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": None},
    ),
    "glm4": (
        {"attention_bias": False, "rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "head_dim": 6},
        SHARED | {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": None},
    ),
    "cwm": (
        {"layer_types": None, "rope_parameters": LINEAR},
        {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True, "rope_parameters": YARN},
        SHARED | {"head_dim": 6, "layer_types": ["sliding_attention"] * 2, "sliding_window": 1},
    ),
    "granitemoe": (
        {"num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": YARN, "tie_word_embeddings": True},
        GROUPS_OF_THREE | {"residual_multiplier": 1.5, "rms_norm_eps": 1e-2},
    ),
    "granitemoeshared": (
        {"shared_intermediate_size": 0, "num_experts_per_tok": 4},
        {"shared_intermediate_size": 16, "num_key_value_heads": 1, "rope_parameters": YARN},
    ),
    "hyperclovax": (
        {"use_post_norm": False, "attention_multiplier": None, "rope_parameters": YARN},
        SHARED | {"logits_scaling": 0.5, "residual_multiplier": 1.0, "tie_word_embeddings": True},
    ),
    "vaultgemma": (
        {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None, "hidden_activation": "silu"},
        {"sliding_window": 40, "rope_parameters": LINEAR, "num_key_value_heads": 1, "final_logit_softcapping": None},
    ),
    "glm4_moe": (
        {"first_k_dense_replace": 0, "use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": True},
        {"num_hidden_layers": 3, "first_k_dense_replace": 2, "n_shared_experts": 1, "norm_topk_prob": False},
    ),
    "dots1": (
        {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "rope_parameters": YARN, "n_shared_experts": 1},
    ),
    "solar_open": ({"rope_parameters": YARN, "attention_bias": True},),
    "exaone_moe": (
        {"mlp_layer_types": ["sparse", "dense"], "num_shared_experts": 2, "rope_parameters": LINEAR},
        {"layer_types": ["full_attention"] * 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "minimax_m2": ({"rope_parameters": YARN, "num_local_experts": 8}, {"rotary_dim": 8, "tie_word_embeddings": True}),
    "gpt_oss": (
        {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": False, "rope_parameters": YARN},
        {"num_local_experts": 8, "num_experts_per_tok": 1, "rope_parameters": LINEAR, "tie_word_embeddings": True},
        {"layer_types": ["full_attention"] * 2, "num_local_experts": 3},
    ),
    "deepseek_v2": (
        {"q_lora_rank": 24, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "v_head_dim": 4}
        | {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        {"first_k_dense_replace": 0, "n_shared_experts": 1, "rope_parameters": LINEAR, "tie_word_embeddings": True},
    ),
    "deepseek_v3": (
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": YARN, "v_head_dim": 10},
        {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "rope_parameters": LINEAR},
    ),
    "glm4_moe_lite": (
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": YARN | {"mscale": 0.7}}
        | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        {"mlp_layer_types": ["dense", "sparse"], "norm_topk_prob": False, "tie_word_embeddings": True}
        | {"n_shared_experts": 1, "v_head_dim": 4},
    ),
    "sarvam_mla": (
        {"q_lora_rank": 12, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_parameters": LINEAR},
        {"first_k_dense_replace": 0, "n_shared_experts": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "youtu": (
        {"q_lora_rank": None, "rope_parameters": YARN | {"mscale_all_dim": 0.8}, "tie_word_embeddings": False},
        {"v_head_dim": 4, "rope_parameters": LINEAR, "rms_norm_eps": 1e-2},
    ),
    "ministral3": (
        {"sliding_window": 5, "rope_parameters": GROWING | {"mscale_all_dim": 0.0}, "tie_word_embeddings": True},
        GROUPS_OF_THREE | {"rope_parameters": GROWING | {"attention_factor": 0.75}, "rms_norm_eps": 1e-2},
        {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.0, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "mistral4": (
        {"q_lora_rank": None, "first_k_dense_replace": 0, "norm_topk_prob": False, "v_head_dim": 4}
        | {"rope_parameters": GROWING},
        {"n_shared_experts": 1, "tie_word_embeddings": True, "routed_scaling_factor": 1.0}
        | {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "hunyuan_v1_dense": (
        SHARED | {"rope_parameters": YARN, "tie_word_embeddings": True},
        GROUPS_OF_THREE | {"rope_parameters": {"rope_theta": 50.0}, "rms_norm_eps": 1e-2, "head_dim": 8},
        {"rope_parameters": {"rope_theta": 10.0} | ALPHA | {"alpha": 1000.0}, "num_key_value_heads": 1},
    ),
    "xglm": (
        {"scale_embedding": False, "tie_word_embeddings": False, "activation_function": "gelu_new"},
        {"attention_heads": 2, "d_model": 48, "ffn_dim": 40, "max_position_embeddings": 30},
    ),
    "biogpt": (
        {"scale_embedding": False, "tie_word_embeddings": False, "hidden_act": "gelu_new"},
        {"num_attention_heads": 2, "hidden_size": 48, "intermediate_size": 40, "max_position_embeddings": 30},
    ),
    "hy_v3": (
        {"mlp_layer_types": ["sparse", "dense"], "num_shared_experts": 1, "tie_word_embeddings": True},
        {"num_experts": 8, "num_experts_per_tok": 1, "rope_parameters": YARN, "rms_norm_eps": 1e-2},
    ),
    "mellum": (
        {"layer_types": None, "mlp_layer_types": None, "rope_parameters": None, "tie_word_embeddings": True},
        {"layer_types": ["sliding_attention"] * 3, "norm_topk_prob": False, "num_experts": 8, "sliding_window": 3},
    ),
    "aria_text": (
        {"moe_num_shared_experts": 1, "tie_word_embeddings": True, "rope_parameters": YARN},
        GROUPS_OF_THREE | {"moe_num_experts": 8, "moe_topk": 1, "rms_norm_eps": 1e-2},
    ),
    "llama4": (
        {
            "moe_layers": [0, 2],
            "no_rope_layers": [0, 1, 1],
            "layer_types": ["full_attention", *["chunked_attention"] * 2],
        }
        | {"use_qk_norm": False, "rope_parameters": YARN, "tie_word_embeddings": True},
        {"attention_chunk_size": None, "layer_types": None, "attn_temperature_tuning": False, "num_experts_per_tok": 2},
        {"moe_layers": None, "interleave_moe_layer_step": 1, "no_rope_layers": None, "no_rope_layer_interval": 3}
        | {"layer_types": None, "attention_chunk_size": 4, "rope_parameters": LINEAR, "rms_norm_eps": 1e-2},
    ),
    "flex_olmo": (
        {"num_experts": 8, "num_experts_per_tok": 1, "tie_word_embeddings": True},
        {"num_key_value_heads": 16, "norm_topk_prob": True, "rope_parameters": YARN},
    ),
}


VISION = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "image_size": 4}
VISION |= {"patch_size": 2}
WRAPPERS = {
    "Gemma3": {"vision_config": VISION, "mm_tokens_per_image": 1},
    "Llama4": {"vision_config": VISION | {"projector_input_dim": 8, "projector_output_dim": 8, "vision_output_dim": 8}},
    "Mistral3": {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 8}, "spatial_merge_size": 1}
    | {"tie_word_embeddings": False},
}


def find_class(config):
    """Returns transformers' class; its classes of language models lack Mistral 4, and Mistral 3 with images."""
    import transformers

    if config.model_type == "mistral4":
        return transformers.Mistral4ForCausalLM
    return (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )


def build(config):
    """Returns the model of a configuration, with new weights."""
    found = find_class(config)
    make = found.from_config if found.__name__.startswith("Auto") else found._from_config
    return make(config, attn_implementation="eager").eval()


def load(folder):
    """Returns the model that transformers loads from a folder."""
    import transformers

    found = find_class(transformers.AutoConfig.from_pretrained(folder))
    return found.from_pretrained(folder, attn_implementation="eager").eval()


def make_model(name: str, seed: int = 0, wrapper: str = "", **changes):
    """In float32, its weights rounded to bfloat16; large enough that every one of them shows in the logits.

    wrapper: the model of text and images, such as Gemma3, in which it is the model of text.
    """
    import torch
    import transformers

    family, options = MODELS[name]
    settings = copy.deepcopy(options | changes)  # transformers writes into the dictionaries of rope_parameters
    config = getattr(transformers, f"{family}Config")(**settings)
    if wrapper:
        options = WRAPPERS[wrapper] | {"tie_word_embeddings": wrapper == "Gemma3" or config.tie_word_embeddings}
        config = getattr(transformers, f"{wrapper}Config")(text_config=config.to_dict(), **options)
    torch.manual_seed(seed)
    model = build(config)
    if name == "progen":  # Salesforce's own code is CodeGen's with 8 cores instead of 4
        for layer in model.transformer.h:
            layer.attn.mp_num = 8
    for key, parameter in model.named_parameters():
        random = torch.randn_like(parameter)
        is_norm = parameter.ndim == 1 and key.endswith("weight") and not name.startswith(ADDS_ONE_TO_SCALES)
        width = 0.1 if parameter.ndim == 1 else 0.1 if "wpe" in key else parameter.shape[-1] ** -0.5
        if name == "gpt_neo" and "q_proj" in key:
            width /= 2  # it divides no logits by sqrt(4): learned queries are that much smaller
        if name in ROUNDED_BY_TRANSFORMERS and parameter.ndim == 2:
            width *= 0.6
        parameter.data = (width * random + is_norm).to(torch.bfloat16).to(torch.float32)
        if "embed_positions" in key:
            parameter.data[:2] = 0  # of padding, which nothing attends to
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_((0.1 * torch.randn_like(buffer)).to(torch.bfloat16))
    return model


def compute(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model = model.language_model  # without images, transformers 5.24 fails after it has computed the logits
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def to_float64(model):
    """Returns a copy that computes in float64, in which torch has no grouped products of experts."""
    result = copy.deepcopy(model)
    result.set_experts_implementation("eager")
    return result.double()


def continue_greedily(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    ids = torch.from_numpy(tokens).long()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).numpy()


def main() -> None:
    import torch

    for name in sys.argv[1:] or MODELS:
        model, folder = make_model(name), FOLDER / name
        tokens = np.random.RandomState(0).randint(0, VOCAB, (2, SEQ)).astype(np.int32)
        logits = compute(model, tokens)
        continued = continue_greedily(model, tokens[:1, : SEQ - NEW]).astype(np.int32)
        model.to(torch.bfloat16).save_pretrained(folder)
        if name in OTHER_TYPES:
            config = json.loads((folder / "config.json").read_text()) | OTHER_TYPES[name]
            (folder / "config.json").write_text(json.dumps(config, indent=2))
        np.savez(folder / "golden.npz", tokens=tokens, logits=logits, continued=continued)
        print(name, logits.std(), sum(path.stat().st_size for path in folder.iterdir()))


if __name__ == "__main__":
    main()
