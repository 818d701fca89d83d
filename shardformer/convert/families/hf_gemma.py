"""Gemma 1: `GemmaForCausalLM`. Llama with norms that add 1 to their scales, scaled embeddings and a gated gelu."""

from shardformer.config import Config
from shardformer.convert.families import gemma
from shardformer.convert.families.family import ACTIVATIONS, GATED_ACTIVATIONS, Family, read_activation
from shardformer.convert.families.hf_llama import LLAMA, read_head_size, read_rotary, write_rotary

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
# The first files name gelu's erf form, by mistake: transformers computes the tanh form for them.
_TANH = {name: "geglu" for name, ours in ACTIVATIONS.items() if ours == "gelu"} | {"gelu": "geglu"}


def _read(theirs: dict) -> dict:
    result = read_activation(theirs, "hidden_act", _TANH | GATED_ACTIVATIONS) | read_head_size(theirs)
    return result | read_rotary(theirs) | {"kv_heads": theirs["num_key_value_heads"]}


def _write(c: Config) -> dict:
    sizes = {"num_key_value_heads": c.model.key_value_heads, "head_dim": c.model.head_size}
    return sizes | {"hidden_act": gemma.TO_ACTIVATIONS[c.model.activation]} | write_rotary(c)


GEMMA_1 = Family(
    architecture="GemmaForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS,
    fixed=gemma.FIXED,
    ours=LLAMA.ours | {"norm": "rmsnorm_plus_one", "embed_scale": None},
    read=_read,
    write=_write,
    also=LLAMA.also,
    outside=LLAMA.outside,
    layer=LLAMA.layer,
    dropouts=LLAMA.dropouts,
    harmless=("hidden_activation",),  # which only Gemma 2 and later read
    variants=lambda c: LLAMA.variants(c) | {"activation": tuple(gemma.TO_ACTIVATIONS)},
)
