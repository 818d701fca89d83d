"""Falcon: `FalconForCausalLM` with rotary positions. Falcon-RW has ALiBi, which transformers rounds to bfloat16."""

from typing import Any

from shardformer.config import Config
from shardformer.convert.families.family import (
    LAYERNORM,
    ROPE_KEYS,
    TO_ACTIVATIONS,
    Family,
    read_activation,
)
from shardformer.convert.families.hf_llama import read_rotary, write_rotary
from shardformer.convert.families.layout import Part, Stored, half_split, head, linear, neighbours, norm, table
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "num_kv_heads": None, "ffn_hidden_size": None, "activation": "gelu", "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
    "num_ln_in_parallel_attn": None, "tie_word_embeddings": True, "bos_token_id": 11, "eos_token_id": 11,
    "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    result = read_activation(theirs, "activation") | read_rotary(theirs) | {"block": _read_block(theirs)}
    heads = theirs["num_attention_heads"]
    if theirs["new_decoder_architecture"]:
        return result | {"kv_heads": heads if theirs["num_kv_heads"] is None else theirs["num_kv_heads"]}
    return result | {"kv_heads": 1 if theirs["multi_query"] else heads}


def _read_block(theirs: dict) -> str:
    """Returns our residual block; with the new architecture, transformers reads neither multi_query nor all else."""
    norms, new = theirs["num_ln_in_parallel_attn"], bool(theirs["new_decoder_architecture"])
    if norms not in (None, 1, 2) or (norms == 2 and not new):
        raise UsageError(f"num_ln_in_parallel_attn={norms!r:.80} is not computed here without the new architecture")
    if not theirs["parallel_attn"]:
        if new:
            raise UsageError("parallel_attn=False contradicts new_decoder_architecture=True")
        return "sequential"
    return "parallel_two_norms" if new and norms in (None, 2) else "parallel"


def _write(c: Config) -> dict[str, Any]:
    grouped = _is_grouped(c)
    return write_rotary(c) | {
        "new_decoder_architecture": grouped,
        "num_kv_heads": c.model.key_value_heads,
        "multi_query": c.model.key_value_heads == 1,
        "parallel_attn": c.model.block != "sequential",
        "num_ln_in_parallel_attn": 2 if c.model.block == "parallel_two_norms" else 1,
        "activation": TO_ACTIVATIONS[c.model.activation],
    }


def _is_grouped(c: Config) -> bool:
    """Returns whether only the new architecture has this model; both store one key/value head alike."""
    return c.model.block == "parallel_two_norms" or 1 < c.model.key_value_heads < c.model.heads


def _outside(c: Config) -> list[Stored]:
    return [table("transformer.word_embeddings.weight", c), *norm("transformer.ln_f", "head/norm", c),
            *head("lm_head", c)]  # fmt: skip


def _layer(c: Config) -> list[Stored]:
    D, F, H, at = c.model.d_model, c.model.ff_size, c.model.heads, "transformer.h.{}"
    return [
        *_list_norms(c, at),
        join_heads(c, f"{at}.self_attention.query_key_value.weight"),
        linear(f"{at}.self_attention.dense", "o", D, H * c.model.head_size),
        linear(f"{at}.mlp.dense_h_to_4h", "up", F, D),
        linear(f"{at}.mlp.dense_4h_to_h", "down", D, F),
    ]


def _list_norms(c: Config, at: str) -> list[Stored]:
    names = {
        "parallel": (("input_layernorm", "norm"),),
        "parallel_two_norms": (("ln_attn", "attention_norm"), ("ln_mlp", "feed_forward_norm")),
        "sequential": (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "feed_forward_norm")),
    }
    return [stored for theirs, ours in names[c.model.block] for stored in norm(f"{at}.{theirs}", ours, c)]


def join_heads(c: Config, name: str, kind: str = "") -> Stored:
    """Describes q, k and v in one array: for each key/value head its query heads, then itself and its values.

    kind: the ending of our names, "" for the matrices and "_bias" for their biases.
    """
    D, H, G, K = c.model.d_model, c.model.heads, c.model.key_value_heads, c.model.head_size
    shared = H // G
    queries = [
        part._replace(view=_by_group(part, G, shared), cut=(slice(None), slice(0, shared), *part.cut[1:]))
        for part in half_split(f"q{kind}", c, H)
    ]
    keys = half_split(f"k{kind}", c, G, (shared,))
    values = neighbours(f"v{kind}", c, G, (shared + 1,))
    inputs = () if kind else (D,)
    return Stored(name, (G * (shared + 2) * K, *inputs), (*queries, *keys, *values), seen=(G, shared + 2, K, *inputs))


def _by_group(part: Part, groups: int, shared: int):
    def show(ours):
        by_head = part.view(ours)  # [heads, columns, D]
        return by_head.reshape(groups, shared, *by_head.shape[1:])

    return show


FALCON = Family(
    architecture="FalconForCausalLM",
    names={
        "layers": "num_hidden_layers", "d_model": "hidden_size", "heads": "num_attention_heads",
        "seq": "max_position_embeddings", "d_ff": "ffn_hidden_size", "vocab": "vocab_size",
        "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
    },
    defaults=DEFAULTS,
    fixed={"alibi": (False,), "bias": (False,), "apply_residual_connection_post_layernorm": (False,)},
    ours=LAYERNORM | {"bias": "norm", "positions": "rotary"},
    read=_read,
    write=_write,
    also=ROPE_KEYS,
    outside=_outside,
    layer=_layer,
    dropouts=("attention_dropout", "hidden_dropout"),
    aliases={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size",
             "n_head_kv": "num_kv_heads"},
    variants=lambda c: {
        "block": ("parallel", "parallel_two_norms", "sequential"),
        "kv_heads": (1, None, c.model.heads) if c.model.block == "sequential" else None,
        "rotary_dims": (None, c.model.head_size),
        "rotary_scaling": None,
        "rotary_theta": None,
    },
)  # fmt: skip
