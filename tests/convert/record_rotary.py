"""Records the rotary frequencies that transformers computes for config.json files with old, new and double names.

python -m tests.convert.record_rotary   (needs transformers and torch; goldens/rotary.json is of transformers 5.23)
"""

import json
from pathlib import Path

GOLDEN = Path(__file__).parent / "goldens" / "rotary.json"
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 64, "vocab_size": 61, "max_position_embeddings": 24,
}  # fmt: skip
LLAMA = NEOX | {"model_type": "llama"}
OLD_NEOX = NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 500}
OLD_LLAMA = LLAMA | {"rope_theta": 500.0}
LINEAR = {"type": "linear", "factor": 2.0}
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
YARN_NUMBERS = {
    "beta_fast": 3.0, "beta_slow": 0.5, "original_max_position_embeddings": 20, "attention_factor": 0.75,
}  # fmt: skip
CASES = {
    "neox_defaults": NEOX,
    "neox_old_names": OLD_NEOX,
    "neox_new_names": NEOX | {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    "neox_both_names": OLD_NEOX
    | {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0}},
    "neox_half_of_new_names": NEOX | {"rotary_pct": 0.5, "rope_parameters": {"rope_theta": 300.0}},
    "neox_scaling_over_parameters": NEOX
    | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 300.0}},
    "neox_no_dimensions": NEOX | {"rotary_pct": 0.1},
    "neox_share_zero": NEOX | {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.0}},
    "llama_defaults": LLAMA,
    "llama_old_name": LLAMA | {"rope_theta": 500.0},
    "llama_new_name": LLAMA | {"rope_parameters": {"rope_theta": 300.0}},
    "llama_both_names": LLAMA | {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 300.0}},
    "llama_scaling_over_parameters": OLD_LLAMA
    | {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 300.0}},
    "llama_3_without_old_context": LLAMA | {"rope_theta": 500.0, "rope_scaling": LLAMA_3},
    "llama_3_with_old_context": LLAMA
    | {"rope_theta": 500.0, "rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 12}},
    "llama_yarn": LLAMA | {"hidden_size": 64, "rope_theta": 500.0, "rope_scaling": YARN},
    "llama_yarn_with_all_numbers": LLAMA
    | {"hidden_size": 64, "rope_theta": 500.0, "rope_scaling": YARN | YARN_NUMBERS},
    "llama_yarn_untruncated": LLAMA
    | {"hidden_size": 64, "rope_theta": 500.0, "rope_scaling": YARN | YARN_NUMBERS | {"truncate": False}},
    "llama_yarn_of_one_turn": LLAMA
    | {"rope_theta": 500.0, "rope_scaling": YARN | {"original_max_position_embeddings": 6}},
}  # fmt: skip


def record(config: dict) -> tuple[list[float], float]:
    """Returns the frequencies, and the factor on cosines and sines."""
    import transformers
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = dict(config)
    kind = config.pop("model_type")
    if kind == "llama":
        found = LlamaRotaryEmbedding(transformers.LlamaConfig(**config))
    else:
        found = GPTNeoXRotaryEmbedding(transformers.GPTNeoXConfig(**config))
    return found.inv_freq.tolist(), found.attention_scaling


if __name__ == "__main__":
    found = {}
    for name, config in CASES.items():
        frequencies, factor = record(config)
        found[name] = {"config": config, "frequencies": frequencies} | ({"factor": factor} if factor != 1 else {})
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
