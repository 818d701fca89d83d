"""`memory`: predicted, compiled and live bytes of a step on the devices of this machine."""

import dataclasses

from shardformer import storage
from shardformer.analysis import live, traced
from shardformer.cli.arguments import parse_settings, say
from shardformer.config import parsing
from shardformer.config.keys import key
from shardformer.config.parsing import PICTURES
from shardformer.layout import mesh


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """The picture (besides every key of a run)."""

    picture: str = key("memory.png", "picture to write; empty draws none")

    def __post_init__(self) -> None:
        storage.new_file_on_disk(self.picture, "picture", PICTURES)


def run_memory(arguments: list[str]) -> None:
    """Prints, and draws, the bytes of one step."""
    options, rest = parsing.parse_known_options(arguments, MemoryOptions)
    settings = parse_settings(rest)
    traced.check_one_program(settings)  # before JAX looks for devices
    settings = mesh.start(settings, say=say)
    measured = live.measure(settings)
    say(live.format_measured(measured))
    if options.picture:
        from shardformer.analysis import pictures

        pictures.draw_memory(measured, options.picture)
        say(f"drawn in {options.picture}")
