"""The split of an adapter's factors follows from that of its matrix."""

import pytest
from jax.sharding import PartitionSpec as P

from shardformer.layout import specs
from tests import shared

EXPERTS = {"experts": 4, "bias": "none"}


@pytest.mark.parametrize(
    ("matrix", "keys", "first", "second"),
    [
        ("q", {}, P(), P(None, None, "mp")),
        ("o", {}, P(None, "mp", None), P()),
        ("k", {"kv_heads": 1}, P(), P()),  # the shards of the model share a head
        ("down", {"mesh": "1x2x2", "layers": 2, "accum": 2}, P("pp", "mp", None), P("pp")),
        ("expert_up", EXPERTS, P(None, "mp", None, None), P(None, "mp", None, None)),
        ("expert_up", EXPERTS | {"experts": 3}, P(), P(None, None, None, "mp")),
        ("expert_down", EXPERTS | {"experts": 3}, P(None, None, "mp", None), P()),
    ],
)
def test_only_the_factor_with_the_split_dimension_is_split(matrix, keys, first, second):
    config = shared.tiny(**{"mesh": "1x2"} | keys)
    name = f"transformer/layers/{matrix}_lora_"
    assert specs.parameter_spec(f"{name}in", config) == first
    assert specs.parameter_spec(f"{name}out", config) == second
