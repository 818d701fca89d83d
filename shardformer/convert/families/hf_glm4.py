"""GLM-4-0414 and GLM-Z1: `Glm4ForCausalLM`. GLM-4 with norms before and after both branches."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_glm import GLM, list_joined_projections
from shardformer.convert.families.layout import Stored, norm


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}"
    return [
        *norm(f"{at}.input_layernorm", "attention_norm", c),
        *norm(f"{at}.post_self_attn_layernorm", "post_attention_norm", c),
        *norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
        *norm(f"{at}.post_mlp_layernorm", "post_feed_forward_norm", c),
        *list_joined_projections(c),
    ]


GLM_4 = dataclasses.replace(
    GLM, architecture="Glm4ForCausalLM", ours=GLM.ours | {"block": "sequential_four_norms"}, layer=_layer
)
