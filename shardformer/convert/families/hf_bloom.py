"""BLOOM: `BloomForCausalLM`. Its layers hold the arrays of GPT-NeoX's."""

from shardformer.config import Config
from shardformer.convert.families.family import LAYERNORM, Family
from shardformer.convert.families.hf_gpt_neox import list_layer
from shardformer.convert.families.layout import Stored, head, norm, table
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "n_inner": None, "seq_length": 2048,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    width = 4 * theirs["hidden_size"]
    if theirs["n_inner"] not in (None, width):
        raise UsageError(f"n_inner={theirs['n_inner']!r:.80} is not computed here; expected 4 * hidden_size = {width}")
    return {"d_ff": None}


def _write(c: Config) -> dict:
    return {"n_inner": 4 * c.model.d_model}


def _outside(c: Config) -> list[Stored]:
    return [
        table("transformer.word_embeddings.weight", c),
        *norm("transformer.word_embeddings_layernorm", "embed/norm", c),
        *norm("transformer.ln_f", "head/norm", c),
        *head("lm_head", c),
    ]


def _layer(c: Config) -> list[Stored]:
    return list_layer(c, "transformer.h.{}", "self_attention")


BLOOM = Family(
    architecture="BloomForCausalLM",
    names={
        "layers": "n_layer", "d_model": "hidden_size", "heads": "n_head", "seq": "seq_length", "d_ff": "n_inner",
        "vocab": "vocab_size", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
    },
    defaults=DEFAULTS,
    fixed={"apply_residual_connection_post_layernorm": (False,)},
    ours=LAYERNORM
    | {"block": "sequential", "bias": "all", "positions": "alibi", "embed": "norm", "activation": "gelu"}
    | {"head_bias": False},
    read=_read,
    write=_write,
    also=(),
    outside=_outside,
    layer=_layer,
    dropouts=("attention_dropout", "hidden_dropout"),
    silent=("pretraining_tp", "slow_but_exact"),  # the order of sums
    harmless=(
        "attention_softmax_in_fp32", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv",
        "bias_dropout_fusion", "unk_token_id",
    ),
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    variants=lambda c: {"d_ff": (None, 4 * c.model.d_model)},
)  # fmt: skip
