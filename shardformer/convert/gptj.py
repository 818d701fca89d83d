"""GPT-J's parameters: the name of each here and there, and what its shards' copies have to do with the whole.

Rules go by name, never by a shape or a value, which cannot tell a bias that is split from one that is summed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardformer.config import Config
from shardformer.convert.leaves import Filled, Readable, flatten
from shardformer.convert.shard_files import Member
from shardformer.errors import UsageError
from shardformer.model import Model

ROOT = "causal_transformer_shard/~/"
PREDICTED_NEVER = np.float32(-1e10)  # a padded token's bias, where no mask keeps it from being predicted
# GPT-J adds a bias to the embedding, on every shard before their sum; without embed_bias the table takes it up.
TABLE, TABLE_BIAS, HEAD_BIAS = "transformer/embed/tokens", "transformer/embed/bias", "transformer/head/bias"

Array = np.ndarray | Filled | Readable
Leaves = dict[str, Array]  # our name -> the whole array


@dataclasses.dataclass(frozen=True)
class Split:
    """Every shard has its part of an axis. `transposed`: that axis is ours, counted after turning GPT-J's matrix."""

    axis: int
    transposed: bool = False

    def index(self, shape: tuple[int, ...], shard: int, shards: int) -> tuple[slice, ...]:
        """Which part of the whole one shard has."""
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
    """Each shard adds its own before the sum over shards: the sum counts."""

    def join(self, parts: Sequence[Member], whole: np.ndarray) -> None:
        whole[...] = functools.reduce(np.add, [part.read().astype(np.float64) for part in parts])

    def cut(self, whole: Array, layer: tuple[int, ...], shard: int, shards: int) -> np.ndarray:
        """All of it on shard 0: equal shares would lose bits to division. -0.0 is what adds nothing, even to -0.0."""
        part = whole[layer or ...]
        return part if shard == 0 else np.full_like(part, -0.0)


class First:
    """Every shard has a whole copy, and shard 0's counts."""

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
    """One array of a GPT-J checkpoint, on every shard."""

    name: str
    rule: Rule
    layer: int | None = None  # of ours, which are stacked


def list_leaves(config: Config) -> list[Leaf]:
    """All parameters, as JAX flattens {module: {name: array}}: layer_10 comes before layer_2."""
    rules = MODEL_RULES + POSITION_RULES.get(config.positions, ())
    found = [Leaf(ROOT + rule.theirs, rule) for rule in rules]
    for layer in range(config.layers):
        found += [Leaf(ROOT + rule.theirs.format(layer), rule, layer) for rule in LAYER_RULES]
    return sorted(found, key=lambda leaf: leaf.name.rpartition("/")[::2])


def list_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Our name -> the whole's shape, the embedding's bias among them."""
    parameters = flatten(Model.abstract_parameters(config))
    return {name: leaf.shape for name, leaf in parameters.items()} | {TABLE_BIAS: (config.d_model,)}


def part_shape(leaf: Leaf, shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """What one shard holds of a leaf whose stacked whole has this shape."""
    whole = np.broadcast_to(np.float32(0), shape if leaf.layer is None else shape[1:])
    return leaf.rule.shards.cut(whole, (), 0, shards).shape


def check_expressible(config: Config, shards: int = 1) -> None:
    """Refuses by name what GPT-J's code cannot compute."""
    fixed = {
        "block": "parallel", "norm": "layernorm", "norm_eps": 1e-5, "bias": "ff", "head_bias": True, "tied": False,
        "activation": "gelu", "attention_scale": None, "rotary_theta": 10_000.0, "rotary_scaling": "",
        "t5_buckets": 32, "lora_rank": 0,
    }  # fmt: skip
    for key, value in fixed.items():
        if getattr(config, key) != value:
            raise UsageError(f"{key}={getattr(config, key)} has no counterpart in GPT-J, which has {key}={value} alone")
    if config.key_value_heads != config.heads:
        raise UsageError(f"kv_heads={config.kv_heads} has no counterpart in GPT-J, whose heads all have their own keys")
    if config.ff_size != 4 * config.d_model:
        raise UsageError(f"d_ff={config.ff_size} has no counterpart in GPT-J, whose d_ff is 4 * d_model alone")
    sizes = {"heads": config.heads, "the padded vocabulary": config.padded_vocab}
    for name, size in sizes.items():
        if size % shards:
            raise UsageError(f"{name} ({size}) does not divide into shards={shards}; give a divisor of it")


def as_moment(leaf: Leaf) -> Leaf:
    """A summed parameter's gradient is whole on every shard: its moments are copies, of which none is added."""
    return leaf._replace(rule=leaf.rule._replace(shards=FIRST)) if leaf.rule.shards is SUMMED else leaf
