"""NamedShape is a tuple that also knows the sizes of named axes."""

from shardformer.legacy.named_shapes import NamedShape


def test_names_count_in_a_comparison():
    assert NamedShape(2, i=3) == NamedShape(2, i=3)
    assert NamedShape(2, i=3) != NamedShape(2, i=4)
    assert NamedShape(2) == (2,)
    assert NamedShape(2) != None  # noqa: E711
