"""The commands by name. What only one of them needs is imported when it runs."""

from pathlib import Path

from shardformer import data
from shardformer.cli.eval_command import evaluate
from shardformer.cli.sample_command import sample
from shardformer.cli.show_command import show
from shardformer.cli.train_command import train
from shardformer.cli.words import say
from shardformer.errors import UsageError


def import_data(words: list[str]) -> None:
    if len(words) != 2 or words[0] != "import":
        raise UsageError("data takes: import INPUT.TXT")
    say(f"tiny_shakespeare is prepared in {data.import_shakespeare(Path(words[1]))}")


def bench(words: list[str]) -> None:
    from shardformer.bench import command_line

    command_line.main(words)


def convert(words: list[str]) -> None:
    """A checkpoint of GPT-J to a run, or a run to one of GPT-J."""
    from shardformer.convert import command

    command.main(words, say)


def legacy(words: list[str]) -> int:
    """An unedited script of xmap's time, or `--check`: what such code needs."""
    from shardformer.legacy import script

    return script.main(words)


COMMANDS = {
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "data": import_data,
    "show": show,
    "bench": bench,
    "convert": convert,
    "legacy": legacy,
}
