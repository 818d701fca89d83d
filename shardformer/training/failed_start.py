"""A start that failed before its first step: its folder may be replaced by a new run."""

from pathlib import Path

from shardformer.checkpoint import FolderTaken
from shardformer.storage import BucketPath

DOCUMENTS = ("config.json", "vocabulary.json", "tokenizer.json", "special_tokens.json", "chat_template.json")


def check(out: Path | BucketPath, resume_arguments: str) -> None:
    """Raises FolderTaken unless the run in a folder failed before its first step."""
    if not _never_trained(out):
        raise FolderTaken(
            f"{out} already holds a run; go on with `train --resume {resume_arguments}`, or give the new one another "
            "out="
        )


def remove_from(out: Path | BucketPath) -> None:
    """Deletes the documents of such a start: the next run may have fewer of them."""
    if _never_trained(out):
        for name in DOCUMENTS:
            Path(str(out), name).unlink(missing_ok=True)


def _never_trained(out: Path | BucketPath) -> bool:
    """Returns whether a folder has only a start without a step: metrics.csv without a row, and no checkpoint.

    Always False for a bucket, and for a folder with references, which take time to compute.
    """
    if not isinstance(out, Path) or not all((out / name).is_file() for name in ("config.json", "metrics.csv")):
        return False
    if any(path.name.startswith("step_") or path.name == "references" for path in out.iterdir()):
        return False
    with (out / "metrics.csv").open(errors="replace") as file:
        return bool(file.readline()) and not file.readline()
