"""Which array of a Hugging Face folder holds which of ours, and how it lies there: one list for both ways.

Ours are [inputs, outputs] and stacked over layers; a head's columns lie together, and rotary pairs are neighbours.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardformer.config import Config

View = Callable[[np.ndarray], np.ndarray]


class Part(NamedTuple):
    """A cut of a stored array, and the same numbers of ours: `view` shows ours as the cut lies."""

    ours: str
    view: View = lambda ours: ours
    cut: tuple = ()  # of the stored array as `Stored.seen`; its first axis is never cut but by a number


class Stored(NamedTuple):
    """One array of the folder."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    layer: int | None = None
    seen: tuple[int, ...] = ()  # the shape in which its parts are cut out; () means its own


def list_stored(family: str, config: Config) -> list[Stored]:
    """All arrays of a model, in the order in which they are written."""
    outside, layer = FAMILIES[family]
    found = [stored._replace(parts=_prefixed("transformer/", stored.parts)) for stored in outside(config)]
    for i in range(config.layers):
        for stored in layer(config):
            parts = _prefixed("transformer/layers/", stored.parts)
            found.append(stored._replace(name=stored.name.format(i), parts=parts, layer=i))
    return found


def _prefixed(prefix: str, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(part._replace(ours=prefix + part.ours) for part in parts)


def _turn(ours: np.ndarray) -> np.ndarray:
    return ours.T


def _linear(name: str, ours: str, outputs: int, inputs: int) -> Stored:
    """torch.nn.Linear keeps [outputs, inputs]."""
    return Stored(f"{name}.weight", (outputs, inputs), (Part(ours, _turn),))


def _plain(name: str, ours: str, *shape: int) -> Stored:
    return Stored(name, shape, (Part(ours),))


def _norm(name: str, ours: str, c: Config) -> list[Stored]:
    arrays = [_plain(f"{name}.weight", f"{ours}/scale", c.d_model)]
    return arrays + ([_plain(f"{name}.bias", f"{ours}/offset", c.d_model)] if c.bias != "none" else [])


def _table(name: str, c: Config) -> Stored:
    """Without the rows that pad the vocabulary."""
    return Stored(name, (c.vocab, c.d_model), (Part("embed/tokens", lambda ours: ours[: c.vocab]),))


def _head(name: str, c: Config) -> list[Stored]:
    if c.tied:
        return []
    arrays = [Stored(f"{name}.weight", (c.vocab, c.d_model), (Part("head/w", lambda ours: ours[:, : c.vocab].T),))]
    if c.bias != "none" and c.head_bias:
        arrays.append(Stored(f"{name}.bias", (c.vocab,), (Part("head/bias", lambda ours: ours[: c.vocab]),)))
    return arrays


def _half_split(ours: str, c: Config, heads: int, cut: tuple = ()) -> tuple[Part, ...]:
    """The parts of a projection to heads whose rotary pairs are (j, j + R/2); ours are (2j, 2j + 1)."""
    K, R = c.head_size, c.rotary_size if c.positions == "rotary" else 0
    places = [(slice(0, R // 2), slice(0, R, 2)), (slice(R // 2, R), slice(1, R, 2)), (slice(R, K), slice(R, K))]

    def show(columns: slice, ours: np.ndarray) -> np.ndarray:
        by_head = ours.reshape(*ours.shape[:-1], heads, K)[..., columns]
        return by_head.transpose(1, 2, 0) if by_head.ndim == 3 else by_head  # a bias has no inputs

    return tuple(
        Part(ours, functools.partial(show, columns), (slice(None), *cut, theirs))
        for theirs, columns in places
        if len(range(K)[columns])
    )


def _gptj_outside(c: Config) -> list[Stored]:
    return [_table("transformer.wte.weight", c), *_norm("transformer.ln_f", "head/norm", c), *_head("lm_head", c)]


def _gptj_layer(c: Config) -> list[Stored]:
    D, F, at = c.d_model, c.ff_size, "transformer.h.{}"
    return [
        *_norm(f"{at}.ln_1", "norm", c),
        *[_linear(f"{at}.attn.{name}_proj", name, D, D) for name in "qkv"],
        _linear(f"{at}.attn.out_proj", "o", D, D),
        _linear(f"{at}.mlp.fc_in", "up", F, D),
        _plain(f"{at}.mlp.fc_in.bias", "up_bias", F),
        _linear(f"{at}.mlp.fc_out", "down", D, F),
        _plain(f"{at}.mlp.fc_out.bias", "down_bias", D),
    ]


def _gpt2_outside(c: Config) -> list[Stored]:
    positions = _plain("transformer.wpe.weight", "embed/positions", c.seq, c.d_model)
    return [
        _table("transformer.wte.weight", c), positions, *_norm("transformer.ln_f", "head/norm", c), *_head("lm_head", c)
    ]  # fmt: skip


def _gpt2_layer(c: Config) -> list[Stored]:
    D, F, at = c.d_model, c.ff_size, "transformer.h.{}"
    qkv = tuple(Part(name, cut=(slice(None), j)) for j, name in enumerate("qkv"))
    qkv_bias = tuple(Part(f"{name}_bias", cut=(j,)) for j, name in enumerate("qkv"))
    return [  # its Conv1D keeps [inputs, outputs]
        *_norm(f"{at}.ln_1", "attention_norm", c),
        Stored(f"{at}.attn.c_attn.weight", (D, 3 * D), qkv, seen=(D, 3, D)),
        Stored(f"{at}.attn.c_attn.bias", (3 * D,), qkv_bias, seen=(3, D)),
        _plain(f"{at}.attn.c_proj.weight", "o", D, D),
        _plain(f"{at}.attn.c_proj.bias", "o_bias", D),
        *_norm(f"{at}.ln_2", "feed_forward_norm", c),
        _plain(f"{at}.mlp.c_fc.weight", "up", D, F),
        _plain(f"{at}.mlp.c_fc.bias", "up_bias", F),
        _plain(f"{at}.mlp.c_proj.weight", "down", F, D),
        _plain(f"{at}.mlp.c_proj.bias", "down_bias", D),
    ]


def _gpt_neo_layer(c: Config) -> list[Stored]:
    D, F, at = c.d_model, c.ff_size, "transformer.h.{}"
    return [
        *_norm(f"{at}.ln_1", "attention_norm", c),
        *[_linear(f"{at}.attn.attention.{name}_proj", name, D, D) for name in "qkv"],
        _linear(f"{at}.attn.attention.out_proj", "o", D, D),
        _plain(f"{at}.attn.attention.out_proj.bias", "o_bias", D),
        *_norm(f"{at}.ln_2", "feed_forward_norm", c),
        _linear(f"{at}.mlp.c_fc", "up", F, D),
        _plain(f"{at}.mlp.c_fc.bias", "up_bias", F),
        _linear(f"{at}.mlp.c_proj", "down", D, F),
        _plain(f"{at}.mlp.c_proj.bias", "down_bias", D),
    ]


def _neox_outside(c: Config) -> list[Stored]:
    return [
        _table("gpt_neox.embed_in.weight", c), *_norm("gpt_neox.final_layer_norm", "head/norm", c),
        *_head("embed_out", c),
    ]  # fmt: skip


def _neox_layer(c: Config) -> list[Stored]:
    D, F, H, K, at = c.d_model, c.ff_size, c.heads, c.head_size, "gpt_neox.layers.{}"
    qkv, qkv_bias = [], []
    for j, name in enumerate("qkv"):
        own = c if name != "v" else c.replace(positions="none")  # values do not rotate
        qkv += _half_split(name, own, H, (j,))
        qkv_bias += _half_split(f"{name}_bias", own, H, (j,))
    return [
        *_norm(f"{at}.input_layernorm", "attention_norm", c),
        *_norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
        Stored(f"{at}.attention.query_key_value.weight", (3 * D, D), tuple(qkv), seen=(H, 3, K, D)),
        Stored(f"{at}.attention.query_key_value.bias", (3 * D,), tuple(qkv_bias), seen=(H, 3, K)),
        _linear(f"{at}.attention.dense", "o", D, D),
        _plain(f"{at}.attention.dense.bias", "o_bias", D),
        _linear(f"{at}.mlp.dense_h_to_4h", "up", F, D),
        _plain(f"{at}.mlp.dense_h_to_4h.bias", "up_bias", F),
        _linear(f"{at}.mlp.dense_4h_to_h", "down", D, F),
        _plain(f"{at}.mlp.dense_4h_to_h.bias", "down_bias", D),
    ]


def _llama_outside(c: Config) -> list[Stored]:
    return [_table("model.embed_tokens.weight", c), *_norm("model.norm", "head/norm", c), *_head("lm_head", c)]


def _llama_layer(c: Config) -> list[Stored]:
    D, F, K, at = c.d_model, c.ff_size, c.head_size, "model.layers.{}"
    projections = [
        Stored(f"{at}.self_attn.{name}_proj.weight", (heads * K, D), _half_split(name, c, heads), seen=(heads, K, D))
        for name, heads in (("q", c.heads), ("k", c.key_value_heads))
    ]
    return [
        *_norm(f"{at}.input_layernorm", "attention_norm", c),
        *projections,
        _linear(f"{at}.self_attn.v_proj", "v", c.key_value_heads * K, D),
        _linear(f"{at}.self_attn.o_proj", "o", D, D),
        *_norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
        _linear(f"{at}.mlp.gate_proj", "gate", F, D),
        _linear(f"{at}.mlp.up_proj", "up", F, D),
        _linear(f"{at}.mlp.down_proj", "down", D, F),
    ]


FAMILIES = {
    "gptj": (_gptj_outside, _gptj_layer),
    "gpt2": (_gpt2_outside, _gpt2_layer),
    "gpt_neo": (_gpt2_outside, _gpt_neo_layer),
    "gpt_neox": (_neox_outside, _neox_layer),
    "llama": (_llama_outside, _llama_layer),
}
