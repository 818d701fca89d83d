"""GPT-J's parameters: their names in both formats, and how the parts on shards form the full array.

The rules go by name: shapes and values cannot tell a split bias from a summed bias.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardformer.config import Config
from shardformer.convert.gptj_settings import POSITIONS
from shardformer.convert.leaves import Array, flatten
from shardformer.convert.shard_files import Member
from shardformer.errors import UsageError
from shardformer.model import Model

ROOT = "causal_transformer_shard/~/"
PREDICTED_NEVER = np.float32(-1e10)  # a padded token's bias, where no mask keeps it from being predicted
# GPT-J adds a bias to the embedding on every shard, before the sum over shards. Without embed=bias, the table has
# taken it up.
TABLE, TABLE_BIAS, HEAD_BIAS = "transformer/embed/tokens", "transformer/embed/bias", "transformer/head/bias"

# Keys of which GPT-J's code computes one value.
FIXED = {
    "block": "parallel", "norm": "layernorm", "norm_eps": 1e-5, "bias": "ff", "head_bias": True, "tied": False,
    "activation": "gelu", "attention_scale": None, "rotary_theta": 10_000.0, "rotary_scaling": "",
    "lora_rank": 0, "window": None, "attention_cap": None, "head_dim": None, "qk_norm": "none",
    "embed_scale": 1.0, "logits_cap": None, "residual_scale": 1.0, "logits_scale": 1.0, "window_pattern": "",
    "experts": 0, "sinks": False, "kv_latent": None, "query_growth": 0.0, "previous_tokens": 0,
    "embed_dim": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Split:
    """An axis split over the shards. transposed: GPT-J's matrix is the transpose of ours, whose axis this is."""

    axis: int
    transposed: bool = False

    def index(self, shape: tuple[int, ...], shard: int, shards: int) -> tuple[slice, ...]:
        """Returns the index of one shard's part in the full array."""
        size = shape[self.axis] // shards
        return (slice(None),) * self.axis + (slice(shard * size, (shard + 1) * size),)

    def join(self, parts: Sequence[Member], whole: np.ndarray) -> None:
        for shard, part in enumerate(parts):
            target = whole[self.index(whole.shape, shard, len(parts))]
            part.copy_into(target.T if self.transposed else target)

    def cut(self, whole: Array, layer: tuple[int, ...], shard: int, shards: int) -> np.ndarray:
        part = whole[layer + self.index(whole.shape[len(layer) :], shard, shards)]
        return part.T if self.transposed else part


class Summed:
    """A parameter that each shard adds before the sum over shards: the model's value is the sum."""

    def join(self, parts: Sequence[Member], whole: np.ndarray) -> None:
        whole[...] = functools.reduce(np.add, [part.read().astype(np.float64) for part in parts])

    def cut(self, whole: Array, layer: tuple[int, ...], shard: int, shards: int) -> np.ndarray:
        """Puts the full value on shard 0, as equal shares would lose bits; -0.0 changes no sum, not even -0.0."""
        part = whole[layer or ...]
        return part if shard == 0 else np.full_like(part, -0.0)


class First:
    """A parameter with a full copy on every shard, of which shard 0's is read."""

    def join(self, parts: Sequence[Member], whole: np.ndarray) -> None:
        parts[0].copy_into(whole)

    def cut(self, whole: Array, layer: tuple[int, ...], shard: int, shards: int) -> np.ndarray:
        return whole[layer or ...]


ROWS, COLUMNS, SUMMED, FIRST = Split(0), Split(1), Summed(), First()


class Rule(NamedTuple):
    theirs: str  # after ROOT
    ours: str
    shards: Split | Summed | First
    gathered: bool = False  # all_gather's transpose gave it a gradient too large by the number of shards


LAYER_RULES = (
    Rule("layer_{}/~/linear/w", "transformer/layers/q", COLUMNS),
    Rule("layer_{}/~/linear_1/w", "transformer/layers/v", COLUMNS),
    Rule("layer_{}/~/linear_2/w", "transformer/layers/k", COLUMNS),
    Rule("layer_{}/~/linear_3/w", "transformer/layers/o", ROWS),
    Rule("layer_{}/~/linear_4/w", "transformer/layers/up", COLUMNS),
    Rule("layer_{}/~/linear_4/b", "transformer/layers/up_bias", ROWS),
    Rule("layer_{}/~/linear_5/w", "transformer/layers/down", ROWS),
    Rule("layer_{}/~/linear_5/b", "transformer/layers/down_bias", SUMMED),
    Rule("layer_{}/~/replicated_layer_norm/scale", "transformer/layers/norm/scale", FIRST),
    Rule("layer_{}/~/replicated_layer_norm/offset", "transformer/layers/norm/offset", FIRST),
)
MODEL_RULES = (
    Rule("embedding_shard/~/linear/w", TABLE, ROWS),
    Rule("embedding_shard/~/linear/b", TABLE_BIAS, SUMMED),
    Rule("projection_shard/~/linear/w", "transformer/head/w", COLUMNS),
    Rule("projection_shard/~/linear/b", HEAD_BIAS, ROWS),
    Rule("projection_shard/~/replicated_layer_norm/scale", "transformer/head/norm/scale", FIRST),
    Rule("projection_shard/~/replicated_layer_norm/offset", "transformer/head/norm/offset", FIRST),
)
POSITION_RULES = {
    "learned": (Rule("embedding_shard/pos_embs", "transformer/embed/positions", COLUMNS, gathered=True),),
    "t5": (Rule("relative_position_embs/rel_embedding", "transformer/relative_bias/table", Split(1, transposed=True)),),
}


class Leaf(NamedTuple):
    """One array of a GPT-J checkpoint, which is stored on every shard."""

    name: str
    rule: Rule
    layer: int | None = None  # of ours, which are stacked


def list_leaves(config: Config) -> list[Leaf]:
    """Lists all parameters in the order in which JAX flattens {module: {name: array}}: layer_10 before layer_2."""
    rules = MODEL_RULES + POSITION_RULES.get(config.model.positions, ())
    result = [Leaf(ROOT + rule.theirs, rule) for rule in rules]
    for layer in range(config.model.layers):
        result += [Leaf(ROOT + rule.theirs.format(layer), rule, layer) for rule in LAYER_RULES]
    return sorted(result, key=lambda leaf: leaf.name.rpartition("/")[::2])


def list_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the full shape of each of our names, including the bias of the embedding."""
    parameters = flatten(Model.abstract_parameters(config))
    return {name: leaf.shape for name, leaf in parameters.items()} | {TABLE_BIAS: (config.model.d_model,)}


def part_shape(leaf: Leaf, shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Returns the shape of one shard's part of a leaf; `shape` is that of the full array, stacked over layers."""
    whole = np.broadcast_to(np.float32(0), shape if leaf.layer is None else shape[1:])
    return leaf.rule.shards.cut(whole, (), 0, shards).shape


def check_expressible(config: Config, shards: int = 1) -> None:
    """Rejects a key whose value GPT-J's code cannot compute."""
    config = config.with_factors()
    expected = {key: value for key, value in FIXED.items() if config.get(key) != value}
    if config.model.positions not in POSITIONS.values():
        expected["positions"] = " or ".join(POSITIONS.values())
    if config.model.embed not in ("plain", "bias"):
        expected["embed"] = "bias"
    for key, value in expected.items():
        raise UsageError(f"{key}={config.get(key)} has no counterpart in GPT-J, which has only {key}={value}")
    if config.model.key_value_heads != config.model.heads:
        raise UsageError(
            f"kv_heads={config.model.kv_heads} has no counterpart in GPT-J, whose heads all have their own keys"
        )
    if config.model.ff_size != 4 * config.model.d_model:
        raise UsageError(f"d_ff={config.model.ff_size} has no counterpart in GPT-J, whose d_ff is always 4 * d_model")
    sizes = {"heads": config.model.heads, "the padded vocabulary": config.model.padded_vocab}
    for name, size in sizes.items():
        if size % shards:
            raise UsageError(f"{name} ({size}) does not divide into shards={shards}; give a divisor of it")


def as_moment(leaf: Leaf) -> Leaf:
    """Returns the leaf of a moment; a summed parameter's gradient is full on every shard, and so are its moments."""
    return leaf._replace(rule=leaf.rule._replace(shards=FIRST)) if leaf.rule.shards is SUMMED else leaf
