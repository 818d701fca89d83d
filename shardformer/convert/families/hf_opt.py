"""OPT: `OPTForCausalLM`. OPT-350M has norms of its residual sums, and tokens narrower than its layers."""

from shardformer.config import Config
from shardformer.convert.families.family import HIDDEN_NAMES, LAYERNORM, Family, read_activation
from shardformer.convert.families.hf_gpt2 import write_activation
from shardformer.convert.families.layout import Part, Stored, head, linear, norm, plain, table
from shardformer.errors import UsageError

FIRST = 2  # row of the first position
DEFAULTS = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
    "max_position_embeddings": 2048, "activation_function": "relu", "tie_word_embeddings": True,
    "word_embed_proj_dim": None, "do_layer_norm_before": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    width, has_norms_first = theirs["word_embed_proj_dim"], theirs["do_layer_norm_before"]
    if width is not None and (type(width) is not int or width < 1):
        raise UsageError(f"word_embed_proj_dim={width!r:.80} is not a number of dimensions")
    if not isinstance(has_norms_first, bool):
        raise UsageError(f"do_layer_norm_before={has_norms_first!r:.80}; expected true or false")
    block = "sequential" if has_norms_first else "sequential_sum_norms"
    embed_dim = None if width == theirs["hidden_size"] else width
    return read_activation(theirs, "activation_function") | {"block": block, "embed_dim": embed_dim}


def _write(c: Config) -> dict:
    return write_activation(c) | {
        "do_layer_norm_before": not c.model.sum_norms,
        "word_embed_proj_dim": c.model.table_size,
    }


def place_positions(name: str, c: Config) -> Stored:
    """Returns the table of learned positions, of which the first rows are not read."""
    return Stored(name, (FIRST + c.model.seq, c.model.d_model), (Part("embed/positions"),), first=FIRST)


def _outside(c: Config) -> list[Stored]:
    positions = place_positions("model.decoder.embed_positions.weight", c)
    arrays = [table("model.decoder.embed_tokens.weight", c), positions, *head("lm_head", c)]
    if c.model.table_size != c.model.d_model:
        width, narrow = c.model.d_model, c.model.table_size
        arrays.append(linear("model.decoder.project_in", "embed/project", width, narrow))
        arrays.append(linear("model.decoder.project_out", "head/project", narrow, width))
    return arrays if c.model.sum_norms else arrays + norm("model.decoder.final_layer_norm", "head/norm", c)


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
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    },
    ours=LAYERNORM
    | {"block": "sequential", "bias": "all", "positions": "learned", "head_bias": False, "norm_eps": 1e-5},
    read=_read,
    write=_write,
    also=("activation_function", "do_layer_norm_before", "word_embed_proj_dim"),
    outside=_outside,
    layer=_layer,
    dropouts=("dropout", "attention_dropout"),
    silent=("init_std", "layerdrop"),
    harmless=("activation_dropout",),
    variants=lambda c: {
        "block": ("sequential", "sequential_sum_norms"),
        "embed_dim": None if c.objective.has_vocabulary else (None, c.model.d_model),
    },
)
