"""Finds the source that a word of `data=` names."""

from pathlib import Path

from shardformer.data import builtin, shakespeare
from shardformer.data.source import SHARE, Say, Source, SourceOptions, Texts, split_text
from shardformer.errors import UsageError
from shardformer.files import expand_home
from shardformer.storage import BucketPath, is_url, location


def find_source(name: str, options: SourceOptions, say: Say) -> Source:
    """Returns the source that a name stands for."""
    if name == "auto":
        return _find_shakespeare_or_builtin(say)
    if name == "tiny_shakespeare":
        return Texts(name, shakespeare.load_splits(), through_tf=True)
    if name == "builtin":
        return Texts(name, split_text(builtin.text(), SHARE))
    if name.startswith("tfds:"):
        splits = shakespeare.load_tfds_splits(name.removeprefix("tfds:"), options.field)
        return Texts(name, splits, through_tf=True)
    from shardformer.data import file_sources  # not imported for texts in memory

    if is_url(name):
        origin = location(name)
        assert isinstance(origin, BucketPath)
        return file_sources.find_in_bucket(origin, options, say)
    return file_sources.find_files(name, Path(expand_home(name)), options, say)


def _find_shakespeare_or_builtin(say: Say) -> Source:
    try:
        return Texts("tiny_shakespeare", shakespeare.load_splits(), through_tf=True)
    except UsageError as reason:
        say(f"{reason}\nUntil then, the built-in corpus is used, whose losses are not Shakespeare's.")
        return Texts("builtin", split_text(builtin.text(), SHARE))
