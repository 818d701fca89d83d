"""GPTBigCode (SantaCoder, StarCoder 1): `GPTBigCodeForCausalLM`. GPT-2 whose heads share one key/value head."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.family import TO_ACTIVATIONS
from shardformer.convert.families.hf_falcon import join_heads
from shardformer.convert.families.hf_gpt2 import GPT2
from shardformer.convert.families.layout import Stored, linear, norm, plain

_TO_ACTIVATIONS = TO_ACTIVATIONS | {"gelu": "gelu_pytorch_tanh"}


def _read(theirs: dict) -> dict:
    return GPT2.read(theirs) | {"kv_heads": 1 if theirs["multi_query"] else theirs["n_head"]}


def _write(c: Config) -> dict:
    return {"activation_function": _TO_ACTIVATIONS[c.model.activation], "multi_query": c.model.key_value_heads == 1}


def _layer(c: Config) -> list[Stored]:
    D, F, at = c.model.d_model, c.model.ff_size, "transformer.h.{}"
    result = [*norm(f"{at}.ln_1", "attention_norm", c), *norm(f"{at}.ln_2", "feed_forward_norm", c)]
    result += [join_heads(c, f"{at}.attn.c_attn.weight"), join_heads(c, f"{at}.attn.c_attn.bias", "_bias")]
    for theirs, ours, outputs, inputs in (
        ("attn.c_proj", "o", D, D),
        ("mlp.c_fc", "up", F, D),
        ("mlp.c_proj", "down", D, F),
    ):
        result += [
            linear(f"{at}.{theirs}", ours, outputs, inputs),
            plain(f"{at}.{theirs}.bias", f"{ours}_bias", outputs),
        ]
    return result


GPT_BIGCODE = dataclasses.replace(
    GPT2,
    architecture="GPTBigCodeForCausalLM",
    defaults=GPT2.defaults | {"activation_function": "gelu_pytorch_tanh", "multi_query": True},
    fixed={"scale_attn_weights": (True,), "add_cross_attention": (False,)},
    read=_read,
    write=_write,
    layer=_layer,
    # The number of key/value heads follows from multi_query.
    silent=("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"),
    harmless=(
        "inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_sequence_length", "max_batch_size",
        "pad_key_length", "n_ctx",
    ),
    variants=lambda c: {"kv_heads": (1, None, c.model.heads)},
)  # fmt: skip
