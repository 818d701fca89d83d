"""The groups of layers that a scan runs, if only some layers have experts."""

import pytest

from shardformer.layout import resolve
from shardformer.layout.choose_experts import find_groups
from tests import shared


@pytest.mark.parametrize(
    ("kinds", "multiple", "groups"),
    [
        ("dededede", 1, (0, 2)),
        ("deeeeeee", 1, (1, 1)),  # DeepSeek's
        ("ddeeeee", 1, (2, 1)),
        ("deeeeee", 2, (1, 2)),  # of two types of windows
        ("deedeed", 1, (0, 3)),
        ("dedeed", 1, (1, 3)),
        ("d", 1, (0, 1)),
    ],
)
def test_groups_repeat_after_the_first_layers(kinds, multiple, groups):
    first, period = find_groups(tuple(kind == "e" for kind in kinds), multiple)
    assert (first, period) == groups
    assert all(kinds[i] == kinds[i + period] for i in range(first, len(kinds) - period))


def test_loop_names_its_groups():
    layout = resolve(shared.tiny(mesh="1x1", bias="none", experts=4, layers=6, dense_first=1, expert_pattern="ed"))
    assert layout.reasons["loop"] == "experts in some layers: 0 layers unrolled, then a scan of 3 groups of 2 layers"
    assert not resolve(shared.tiny(mesh="1x1", bias="none", experts=4)).loop.period
