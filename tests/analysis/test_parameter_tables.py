"""The aligned text about parameters: how they are split, and which rules of lr_rules they match."""

from shardformer.analysis import parameter_tables
from shardformer.config import Config
from tests.layout.test_specs import parameters
from tests.optim import trees
from tests.optim.test_rules import RULES

TINY = """
parameter                       shape     spec                 on one device
transformer/embed/tokens        64x32     P('mp', None)        16x32
transformer/head/bias           64        P('mp',)             16
transformer/head/w              32x64     P(None, 'mp')        32x16
transformer/head/norm/offset    32        P()                  32
transformer/head/norm/scale     32        P()                  32
transformer/layers/down         2x128x32  P(None, 'mp', None)  2x32x32
transformer/layers/down_bias    2x32      P()                  2x32
transformer/layers/k            2x32x32   P(None, None, 'mp')  2x32x8
transformer/layers/o            2x32x32   P(None, 'mp', None)  2x8x32
transformer/layers/q            2x32x32   P(None, None, 'mp')  2x32x8
transformer/layers/up           2x32x128  P(None, None, 'mp')  2x32x32
transformer/layers/up_bias      2x128     P(None, 'mp')        2x32
transformer/layers/v            2x32x32   P(None, None, 'mp')  2x32x8
transformer/layers/norm/offset  2x32      P()                  2x32
transformer/layers/norm/scale   2x32      P()                  2x32
all                             29,248                         7,504
"""


def test_table_of_tiny():
    settings, _, tree = parameters("tiny")
    split = parameter_tables.find_splits(tree, settings)
    assert parameter_tables.format_splits(tree, split, settings) == TINY.strip()


def test_the_table_knows_what_zero_splits():
    settings, _, tree = parameters("tiny", mesh="4x2", zero=3)
    split = parameter_tables.find_splits(tree, settings)
    table = parameter_tables.format_splits(tree, split, settings)
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert "P(None, 'dp', 'mp')" in rows["transformer/layers/q"]
    assert rows["transformer/layers/q"].endswith(" 2x8x16")
    assert rows["transformer/embed/tokens"].endswith(" 8x32")  # 8 rows are a tile of a TPU, 8 columns are none


def test_the_table_names_what_each_rule_matches():
    rows = [
        line.split("  ")
        for line in parameter_tables.format_rules(trees.tree(0), Config.of(lr_rules=RULES)).splitlines()
    ]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["rule", "arrays", "numbers", "names"],
        ["*bias=10x", "2", "48", "head/bias, layers/up_bias"],
        ["embed=0.1x", "1", "128", "embed/tokens"],
        ["norm=frozen", "1", "16", "layers/norm/scale"],
        ["up=frozen", "1", "256", "layers/up"],
        ["all others=1x", "3", "512"],
    ]
