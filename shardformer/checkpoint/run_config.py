"""Reads the config.json of a run folder or a checkpoint folder, on a disk or in a bucket."""

from pathlib import Path

from shardformer.config import Config, is_hugging_face, parse_config
from shardformer.errors import UsageError
from shardformer.storage import BucketPath, location, read_small


def read_config(folder: Path | BucketPath) -> Config:
    """Returns the configuration of a run; rejects folders that hold another project's config.json."""
    path = location(folder) / "config.json"
    try:
        text = read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} is not a run: it has no config.json") from None
    if rest := "a Hugging Face folder" if is_hugging_face(text) else "GPT-J's shards" if b'"n_heads"' in text else "":
        raise UsageError(f"{folder} is {rest}; make a run of it first: convert {folder} RUN")
    return parse_config(text, path)
