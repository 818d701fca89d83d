"""OLMo 2: `Olmo2ForCausalLM`. Norms after each branch, and one norm over the queries (or keys) of all heads."""

from shardformer.config import Config
from shardformer.convert.families.family import Family
from shardformer.convert.families.hf_llama import LLAMA, list_projections
from shardformer.convert.families.layout import Stored, half_split, norm

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 50_304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50_279, "pad_token_id": 1,
}  # fmt: skip


def list_qk_norms(c: Config) -> list[Stored]:
    """Lists the norms over the queries and over the keys of all heads."""
    K, at = c.model.head_size, "model.layers.{}.self_attn"
    return [
        Stored(f"{at}.{name}_norm.weight", (heads * K,), half_split(f"{name}_scale", c, heads), seen=(heads, K))
        for name, heads in (("q", c.model.heads), ("k", c.model.key_value_heads))
    ]


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}"
    return [
        *list_projections(c),
        *list_qk_norms(c),
        *norm(f"{at}.post_attention_layernorm", "post_attention_norm", c),
        *norm(f"{at}.post_feedforward_layernorm", "post_feed_forward_norm", c),
    ]


OLMO_2 = Family(
    architecture="Olmo2ForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS,
    fixed={"attention_bias": (False,)},
    ours=LLAMA.ours | {"block": "sequential_post_norms", "qk_norm": "all"},
    read=LLAMA.read,
    write=LLAMA.write,
    also=LLAMA.also,
    outside=LLAMA.outside,
    layer=_layer,
    dropouts=LLAMA.dropouts,
    variants=LLAMA.variants,
)
