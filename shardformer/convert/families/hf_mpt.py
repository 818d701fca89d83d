"""MPT: `MptForCausalLM`. ALiBi, no biases, and q, k and v in one array."""

import math

from shardformer.config import Config
from shardformer.convert.families.family import LAYERNORM, Family
from shardformer.convert.families.layout import Stored, half_split, head, linear, norm, table
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 50_368, "d_model": 2048, "n_layers": 24, "n_heads": 16, "expansion_ratio": 4, "max_seq_len": 2048,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "attn_config": None, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# Settings of attention: the values that are computed, transformers' default first.
ATTENTION: dict[str, tuple] = {
    "attn_type": ("multihead_attention",), "clip_qkv": (None,), "softmax_scale": (None,), "prefix_lm": (False,),
    "qk_ln": (False,), "attn_uses_sequence_id": (False,), "alibi": (True,), "alibi_bias_max": (8,),
}  # fmt: skip
WITHOUT_EFFECT = ("attn_impl", "attn_pdrop", "model_type", "id2label", "label2id", "return_dict")


def _read(theirs: dict) -> dict:
    for key, value in (theirs["attn_config"] or {}).items():
        if key in ATTENTION and value not in ATTENTION[key]:
            raise UsageError(f"attn_config: {key}={value!r:.80} is not computed here; expected {ATTENTION[key][0]!r}")
        if key not in ATTENTION and key not in WITHOUT_EFFECT and value not in (None, False, "", {}, []):
            raise UsageError(f"attn_config: {key}={value!r:.80} is not known here, and may change the model")
    if theirs["expansion_ratio"] != 4:  # transformers does not read it
        raise UsageError(f"expansion_ratio={theirs['expansion_ratio']!r:.80} is not computed here; expected 4")
    heads = theirs["n_heads"]
    if type(heads) is int and heads > 0 and not math.log2(heads).is_integer():
        raise UsageError(
            f"n_heads={heads} is not computed here; expected a power of 2, as MPT orders other slopes of ALiBi"
        )
    return {"d_ff": None}


def _write(c: Config) -> dict:
    attention = {key: values[0] for key, values in ATTENTION.items()}
    return {"expansion_ratio": 4, "attn_config": attention | {"attn_impl": "torch"}}


def _outside(c: Config) -> list[Stored]:
    return [table("transformer.wte.weight", c), *norm("transformer.norm_f", "head/norm", c), *head("lm_head", c)]


def _layer(c: Config) -> list[Stored]:
    D, F, H, K, at = c.model.d_model, c.model.ff_size, c.model.heads, c.model.head_size, "transformer.blocks.{}"
    joined = [part._replace(cut=(j, *part.cut)) for j, name in enumerate("qkv") for part in half_split(name, c, H)]
    return [
        *norm(f"{at}.norm_1", "attention_norm", c),
        *norm(f"{at}.norm_2", "feed_forward_norm", c),
        Stored(f"{at}.attn.Wqkv.weight", (3 * D, D), tuple(joined), seen=(3, H, K, D)),
        linear(f"{at}.attn.out_proj", "o", D, D),
        linear(f"{at}.ffn.up_proj", "up", F, D),
        linear(f"{at}.ffn.down_proj", "down", D, F),
    ]


def _find_variants(c: Config) -> dict[str, tuple | None]:
    result: dict[str, tuple | None] = {"d_ff": (None, 4 * c.model.d_model)}
    if not math.log2(c.model.heads).is_integer():
        result["positions"] = ()
    return result


MPT = Family(
    architecture="MptForCausalLM",
    names={
        "layers": "n_layers", "d_model": "d_model", "heads": "n_heads", "seq": "max_seq_len",
        "vocab": "vocab_size", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
    },
    defaults=DEFAULTS,
    fixed={"no_bias": (True,), "logit_scale": (None,)},
    ours=LAYERNORM | {"block": "sequential", "bias": "none", "positions": "alibi", "activation": "gelu_exact"},
    read=_read,
    write=_write,
    also=(),
    outside=_outside,
    layer=_layer,
    dropouts=("resid_pdrop", "emb_pdrop"),
    silent=("init_device", "embedding_fraction", "norm_type", "learned_pos_emb"),
    harmless=("verbose", "tokenizer_name", "init_config", "fc_type", "use_pad_tok_in_ffn"),
    aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    variants=_find_variants,
)  # fmt: skip
