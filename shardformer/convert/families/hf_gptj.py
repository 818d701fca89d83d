"""GPT-J: `GPTJForCausalLM`.

A fork of transformers had it first, as a GPT-Neo with the keys `rotary` and `jax`.
"""

from shardformer.config import Config
from shardformer.convert.families.family import (
    GPT_ALIASES,
    GPT_NAMES,
    LAYERNORM,
    TO_ACTIVATIONS,
    Family,
    read_activation,
    resolve_aliases,
)
from shardformer.convert.families.hf_gpt_neo import expand_types
from shardformer.convert.families.layout import Stored, head, linear, norm, plain, table
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
    "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None,
}  # fmt: skip
FORK_NAMES = GPT_ALIASES | {
    "num_layers": "n_layer", "num_heads": "n_head", "intermediate_size": "n_inner",
    "attention_dropout": "attn_pdrop", "embed_dropout": "embd_pdrop", "resid_dropout": "resid_pdrop",
}  # fmt: skip
# The defaults of the fork's class, GPT-Neo's, that differ from GPT-J's. `rotary_dim` has none.
FORK_DEFAULTS = {"vocab_size": 50257, "n_embd": 2048, "n_layer": 24, "rotary_dim": None}
FORK_ONLY = {"jax", "attention_types", "attention_layers", "window_size"}
FORK_ARRAYS = {r"\.attn\.": ".attn.attention.", r"\.fc_in\.": ".c_fc.", r"\.fc_out\.": ".c_proj."}


def rename_fork_keys(theirs: dict) -> dict:
    """Returns a config.json of the fork in the keys of transformers' GPT-J. Returns other configurations unchanged."""
    if not (theirs["model_type"] == "gpt_neo" and theirs.get("rotary") and theirs.get("jax")):
        return theirs
    theirs = FORK_DEFAULTS | resolve_aliases(theirs, FORK_NAMES)
    _check_fork_layers(theirs)
    return {key: value for key, value in theirs.items() if key not in FORK_ONLY} | {"model_type": "gptj"}


def _check_fork_layers(theirs: dict) -> None:
    """Rejects layers with windows, which GPT-Neo's two keys may name, and another number of layers."""
    count, types, layers = theirs["n_layer"], theirs.get("attention_types"), theirs.get("attention_layers")
    if types is None and layers is None:
        raise UsageError("attention_types is missing: the default of GPT-Neo has windows, which GPT-J does not compute")
    expanded = types and expand_types(theirs | {"num_layers": count})
    for key, kinds in {"attention_types": expanded, "attention_layers": layers}.items():
        if kinds is not None and (len(kinds) != count or set(kinds) != {"global"}):
            raise UsageError(
                f"{key}={theirs[key]!r:.80} is not computed for GPT-J; expected {count} layers, all 'global'"
            )


def _read(theirs: dict) -> dict:
    if not theirs["rotary_dim"]:
        raise UsageError(f"rotary_dim={theirs['rotary_dim']!r}: the number of dimensions that rotate is missing")
    return read_activation(theirs, "activation_function") | {"rotary_dims": theirs["rotary_dim"]}


def _write(c: Config) -> dict:
    return {"activation_function": TO_ACTIVATIONS[c.model.activation], "rotary_dim": c.model.rotary_size}


def _outside(c: Config) -> list[Stored]:
    return [table("transformer.wte.weight", c), *norm("transformer.ln_f", "head/norm", c), *head("lm_head", c)]


def _layer(c: Config) -> list[Stored]:
    D, F, at = c.model.d_model, c.model.ff_size, "transformer.h.{}"
    return [
        *norm(f"{at}.ln_1", "norm", c),
        *[linear(f"{at}.attn.{name}_proj", name, D, D) for name in "qkv"],
        linear(f"{at}.attn.out_proj", "o", D, D),
        linear(f"{at}.mlp.fc_in", "up", F, D),
        plain(f"{at}.mlp.fc_in.bias", "up_bias", F),
        linear(f"{at}.mlp.fc_out", "down", D, F),
        plain(f"{at}.mlp.fc_out.bias", "down_bias", D),
    ]


GPTJ = Family(
    architecture="GPTJForCausalLM",
    names=GPT_NAMES,
    defaults=DEFAULTS,
    # Attention is always divided by sqrt(head size), and rotary positions have no switch, in transformers' GPT-J.
    fixed={"tie_word_embeddings": (False,), "scale_attn_weights": (True,), "rotary": (True,)},
    ours=LAYERNORM | {"block": "parallel", "bias": "ff", "positions": "rotary"},
    read=_read,
    write=_write,
    also=("activation_function", "rotary_dim"),
    outside=_outside,
    layer=_layer,
    dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    silent=("n_ctx",),
    aliases=GPT_ALIASES,
    older_arrays=FORK_ARRAYS,
    variants=lambda c: {"tied": (False,), "rotary_dims": None},
)
