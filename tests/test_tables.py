from shardformer.tables import format_count, format_table


def test_table_aligns_columns_and_numbers():
    rows = [["train", 1.25, 12345, "4x2", "1.5x"], ["validation + test", None, 7, "16x16", "-"]]
    assert format_table(rows, ["split", "loss", "windows", "mesh", "speed"]).splitlines() == [
        "split                loss  windows  mesh   speed",
        "train              1.2500   12,345  4x2     1.5x",
        "validation + test                7  16x16      -",
    ]
    assert format_table([], ["a", "b"]) == "a  b"


def test_only_one_thing_is_in_the_singular():
    assert [format_count(count, "layer") for count in (0, 1, 2000)] == ["0 layers", "1 layer", "2,000 layers"]
