"""OPT: `OPTForCausalLM`. OPT-350M differs: norms after its branches, and tokens narrower than its layers."""

from shardformer.config import Config
from shardformer.convert.families.family import HIDDEN_NAMES, LAYERNORM, Family, read_activation
from shardformer.convert.families.hf_gpt2 import write_activation
from shardformer.convert.families.layout import Part, Stored, head, linear, norm, plain, table
from shardformer.errors import UsageError

FIRST = 2  # row of the first position
DEFAULTS = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
    "max_position_embeddings": 2048, "activation_function": "relu", "tie_word_embeddings": True,
    "word_embed_proj_dim": None, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    width = theirs["word_embed_proj_dim"]
    if width not in (None, theirs["hidden_size"]):
        raise UsageError(
            f"word_embed_proj_dim={width!r:.80} is not computed here; expected hidden_size={theirs['hidden_size']}"
        )
    return read_activation(theirs, "activation_function")


def _write(c: Config) -> dict:
    return write_activation(c) | {"word_embed_proj_dim": c.model.d_model}


def _outside(c: Config) -> list[Stored]:
    positions = Stored(
        "model.decoder.embed_positions.weight",
        (FIRST + c.model.seq, c.model.d_model),
        (Part("embed/positions"),),
        first=FIRST,
    )
    tokens, last = table("model.decoder.embed_tokens.weight", c), norm("model.decoder.final_layer_norm", "head/norm", c)
    return [tokens, positions, *last, *head("lm_head", c)]


def _layer(c: Config) -> list[Stored]:
    D, F, at = c.model.d_model, c.model.ff_size, "model.decoder.layers.{}"
    matrices = {f"self_attn.{name}_proj": (name, D, D) for name in "qkv"}
    matrices |= {"self_attn.out_proj": ("o", D, D), "fc1": ("up", F, D), "fc2": ("down", D, F)}
    result = [
        *norm(f"{at}.self_attn_layer_norm", "attention_norm", c),
        *norm(f"{at}.final_layer_norm", "feed_forward_norm", c),
    ]
    for theirs, (ours, outputs, inputs) in matrices.items():
        result.append(linear(f"{at}.{theirs}", ours, outputs, inputs))
        result.append(plain(f"{at}.{theirs}.bias", f"{ours}_bias", outputs))
    return result


OPT = Family(
    architecture="OPTForCausalLM",
    names=HIDDEN_NAMES | {"d_ff": "ffn_dim"},
    defaults=DEFAULTS,
    fixed={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    },
    ours=LAYERNORM
    | {"block": "sequential", "bias": "all", "positions": "learned", "head_bias": False, "norm_eps": 1e-5},
    read=_read,
    write=_write,
    also=("activation_function",),
    outside=_outside,
    layer=_layer,
    dropouts=("dropout", "attention_dropout"),
    silent=("init_std", "layerdrop"),
    harmless=("activation_dropout",),
)
