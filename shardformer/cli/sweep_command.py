"""`sweep`: trains every combination of some keys' values, and ranks them."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from shardformer import storage
from shardformer.cli.arguments import names_depth, parse_preset, say, say_table
from shardformer.config import FIELDS, Config, parsing
from shardformer.config.keys import key
from shardformer.config.presets import PRESETS
from shardformer.errors import UsageError
from shardformer.tables import format_count

if TYPE_CHECKING:
    from shardformer.sweep import Sweep


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """The sweep, besides every key of `train`, which may have several values with commas between them"""

    seeds: int = key(1, "runs of each combination, with seed, seed + 1, ...", least=1)
    halvings: int = key(
        0,
        "times that the worse half of the combinations stops; 2: after 1/4 and after 1/2 of the steps; 0: all end",
        least=0,
    )


def sweep(arguments: list[str]) -> None:
    """Trains what is left of a sweep, and prints and draws the results."""
    from shardformer.logs import streams  # with JAX, as the next one
    from shardformer.sweep import Sweep

    config, swept, options = _parse(arguments)
    with streams.lasting_output():
        runs = Sweep.of(config, swept, options.seeds, options.halvings)
        say(f"{format_count(len(runs.settings), 'combination')} x {format_count(options.seeds, 'seed')}")
        is_complete = runs.train()
        say("")
        _report(runs, storage.local_folder(storage.location(config.run.out)) / "sweep.png")
        if not is_complete:
            say("stopped; the same command continues")


def check(arguments: list[str]) -> None:
    """Rejects wrong words; those with base= only when the base is read."""
    if not _has_base(arguments):
        _parse(arguments)


def _parse(arguments: list[str]) -> tuple[Config, dict[str, list], SweepOptions]:
    """Returns the configuration of the first combination, the values of each swept key, and the options."""
    options, rest = parsing.parse_known_options(arguments, SweepOptions)
    words, swept = [], {}
    for word in rest:
        name, equals, text = word.partition("=")
        values = text.split(",") if name in FIELDS and _takes_several(FIELDS[name]) else [text]
        if len(values) > 1:
            swept[name] = [parsing.parse_value(FIELDS[name], value) for value in values]
            if len({*swept[name]}) < len(values):
                raise UsageError(f"{word} has a value twice; give each once")
        words.append(f"{name}={values[0]}" if equals else word)
    if "seed" in swept:
        raise UsageError("give seeds=N in place of several values of seed")
    if not swept and options.seeds == 1:
        raise UsageError("a sweep compares runs: give a key several values, such as lr=1e-3,3e-3, or seeds=3")
    if names_depth(words):
        from shardformer.config.depth import LEADING  # not imported with a preset

        if leading := [name for name in swept if name in LEADING]:
            raise UsageError(f"depth=N chooses other keys by {leading[0]}, which differs here; sweep from a preset")
    if "out" not in {word.partition("=")[0] for word in words}:
        words.append(f"out=checkpoints/{words[0] if words and words[0] in PRESETS else 'finetune'}_sweep")
    return _parse_run(words), swept, options


def _parse_run(words: list[str]) -> Config:
    if _has_base(words):
        from shardformer.cli.base_model import parse_base  # imports JAX, and is not needed without a base

        return parse_base(words)
    return parse_preset(words)


def _has_base(words: list[str]) -> bool:
    return any(word.startswith("base=") for word in words)


def _takes_several(field: dataclasses.Field) -> bool:
    """Returns whether a comma cannot be part of a value: of a number, a switch and a choice."""
    return bool(parsing.choices(field)) or parsing.plain_type(field.type) in (int, float, bool)


def _report(runs: "Sweep", picture: Path) -> None:
    """Prints the combinations, the best first, and draws them."""
    from shardformer.logs.sweep_sheet import Drawn, draw_sweep_sheet

    results = runs.results()
    if not results:
        return
    say_table(
        [[str(r.setting), "failed" if math.isinf(r.loss) else r.step, r.loss, r.deviation] for r in results],
        ["combination", "step", "validation loss", "deviation"],
    )
    drawn = [Drawn(str(r.setting), r.setting.shown, r.loss, r.setting.folders) for r in results]
    say(f"\nwrote {draw_sweep_sheet(drawn, picture)}")
