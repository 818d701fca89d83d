"""`data`: prepares the text that a run is trained on."""

from pathlib import Path

from shardformer import data
from shardformer.cli.words import say
from shardformer.errors import UsageError


def import_data(words: list[str]) -> None:
    if len(words) != 2 or words[0] != "import":
        raise UsageError("data takes: import INPUT.TXT")
    say(f"tiny_shakespeare is prepared in {data.import_shakespeare(Path(words[1]))}")
