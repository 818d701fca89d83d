"""`plot`: two or more runs on one sheet."""

from pathlib import Path

from shardformer import checkpoint, storage
from shardformer.cli.analysis_options import PlotOptions
from shardformer.cli.arguments import run_folder, say, split_paths
from shardformer.config import parsing
from shardformer.errors import UsageError
from shardformer.storage import BucketPath


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
