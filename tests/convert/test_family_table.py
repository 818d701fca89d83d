"""The README of convert has a row for each family, as its recorded models are."""

from shardformer.convert.families import FAMILIES
from tests.convert.family_table import PAGE, make_table, replace_table


def test_page_has_todays_table():
    page = PAGE.read_text()
    assert replace_table(page) == page, "run python -m tests.convert.family_table"
    rows = make_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == sorted(FAMILIES)


def test_a_changed_row_is_noticed():
    page = PAGE.read_text()
    for wrong in (page.replace("| `bloom` | `activation=gelu ", "| `bloom` | `"), page[: page.rindex("| `youtu`")]):
        assert wrong != page
        assert replace_table(wrong) == page
