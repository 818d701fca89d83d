"""The choice between a ring and a gather, by memory and by time."""

import pytest

from shardformer.cli.show_command import format_attention
from shardformer.context.choice import EXCHANGE, Rates, choose_way, find_waits
from tests import shared

SLOW_WIRE, FAST_WIRE = Rates(1e12, 1e6), Rates(1e9, 1e15)
FEW_KEYS = {"mesh": "dp2.cp4.mp1", "heads": 8, "kv_heads": 1, "seq": 512}


@pytest.mark.parametrize(
    ("changes", "rates", "way"),
    [
        ({}, Rates(), "gather"),
        ({}, SLOW_WIRE, "ring"),
        ({}, FAST_WIRE, "gather"),
        ({"kv_heads": 2}, FAST_WIRE, "ring"),  # gathered keys and values would take twice the memory of the queries
        ({"context_parallel": "gather"}, SLOW_WIRE, "gather"),
    ],
)
def test_auto_chooses_by_memory_then_by_time(changes, rates, way):
    assert choose_way(shared.tiny(**FEW_KEYS | changes), rates).way == way


def test_waits_are_those_of_the_roofline():
    config = shared.tiny(**FEW_KEYS | {"batch": 4, "d_model": 64, "dtype": "bfloat16"})
    flops = 4 * 2 * (128 * 128 / 2) * 64  # two rows of a device, 128 x 128 tokens of which the mask leaves half
    sent = 2 * 2 * 128 * 8 * 2  # keys and values of two rows, 128 tokens, one head of 8, two bytes
    hidden = find_waits(config, Rates(flops, sent / 0.75))  # a turn computes for 1 s and sends for 0.75 s
    assert hidden == {"ring": pytest.approx(3 * EXCHANGE), "gather": pytest.approx(3 * 0.75 + EXCHANGE)}
    exposed = find_waits(config, Rates(flops, sent / 3))
    assert exposed == {"ring": pytest.approx(3 * (2 + EXCHANGE)), "gather": pytest.approx(9 + EXCHANGE)}


def test_show_prints_the_choice_and_its_reason():
    shown = format_attention(shared.tiny(**FEW_KEYS | {"batch": 2, "seq": 65_536, "d_model": 1024}))
    assert "gather, blocks of 128 tokens  keys and values of complete rows take 1 times" in shown
    assert "ring, blocks of 128 tokens    a layer waits" in shown
