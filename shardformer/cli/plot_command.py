"""`plot`: two or more runs on one sheet."""

import dataclasses
from pathlib import Path

from shardformer import checkpoint, storage
from shardformer.cli.arguments import run_folder, say, split_paths
from shardformer.config import parsing
from shardformer.config.keys import key
from shardformer.config.parsing import PICTURES
from shardformer.errors import UsageError
from shardformer.storage import BucketPath


@dataclasses.dataclass(frozen=True)
class PlotOptions:
    """The picture."""

    by: str = key("step", "the horizontal axis: step, tokens or time")
    out: str = key("runs.png", "the picture to write")

    def __post_init__(self) -> None:
        if not storage.on_disk(self.out, "out").name:
            raise UsageError(f"out takes the name of a picture, such as runs.png; got {self.out!r}")
        storage.new_file_on_disk(self.out, "out", PICTURES)


def plot(arguments: list[str]) -> None:
    """Draws the metrics of runs from their metrics.csv and config.json; needs no device."""
    from shardformer.logs import run_sheet

    names, rest = split_paths(arguments)
    options = parsing.parse_options(rest, PlotOptions)
    if not names:
        raise UsageError("plot takes one or more folders of runs: plot RUN [RUN ...]")
    folders = [_records(run_folder(name)) for name in names]
    say(f"wrote {run_sheet.draw_runs(folders, options.by, storage.on_disk(options.out, 'out'))}")


def _records(run: Path | BucketPath) -> Path:
    if not (run / "config.json").is_file():
        raise UsageError(checkpoint.describe_no_run(run))
    return storage.read_records(run)
