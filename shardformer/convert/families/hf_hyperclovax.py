"""HyperCLOVA X: `HyperCLOVAXForCausalLM`. Granite with norms after both branches, and logits that are multiplied."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_granite import GRANITE
from shardformer.convert.families.layout import Stored, norm


def _read(theirs: dict) -> dict:
    size = theirs["head_dim"] or theirs["hidden_size"] // theirs["num_attention_heads"]
    scale = theirs["attention_multiplier"]
    result = GRANITE.read(theirs | {"attention_multiplier": size**-0.5 if scale is None else scale})
    block = "sequential_four_norms" if theirs["use_post_norm"] else "sequential"
    return result | {"logits_scale": float(theirs["logits_scaling"]), "block": block}


def _write(c: Config) -> dict:
    block = {"use_post_norm": c.model.block == "sequential_four_norms"}
    return GRANITE.write(c) | {"logits_scaling": c.model.logits_scale} | block


def _layer(c: Config) -> list[Stored]:
    norms = [("post_norm1", "post_attention_norm"), ("post_norm2", "post_feed_forward_norm")]
    norms = norms if c.model.post_norms else []
    return [
        *GRANITE.layer(c),
        *(each for theirs, ours in norms for each in norm(f"model.layers.{{}}.{theirs}", ours, c)),
    ]


HYPERCLOVA_X = dataclasses.replace(
    GRANITE,
    architecture="HyperCLOVAXForCausalLM",
    defaults=GRANITE.defaults | {"attention_multiplier": None, "use_post_norm": True},
    read=_read,
    write=_write,
    layer=_layer,
    variants=lambda c: GRANITE.variants(c) | {"logits_scale": None, "block": ("sequential", "sequential_four_norms")},
)
