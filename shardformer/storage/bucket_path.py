"""The path of an object or a folder in a bucket, with the methods of `pathlib.Path` that this package uses on both."""

import dataclasses
import errno
import os
import re
import tempfile
from pathlib import Path

from shardformer import files
from shardformer.errors import UsageError

_URL = re.compile(r"([a-z0-9+]+)://([^/]*)/*(.*?)/*")


def _bucket():
    """Returns the module of requests to buckets, which runs on a disk do not import."""
    from shardformer.storage import bucket

    return bucket


@dataclasses.dataclass(frozen=True, order=True)
class BucketPath:
    """The path of an object, or of a folder: the common beginning of the names of objects."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> "BucketPath":
        return dataclasses.replace(self, key="/".join(filter(None, (self.key, name))))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "BucketPath":
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def exists(self) -> bool:
        """Returns whether the path is an object or a folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return _bucket().head(self) is not None

    def is_dir(self) -> bool:
        return bool(_bucket().list_objects(self, most=1))

    def read_bytes(self) -> bytes:
        return _bucket().read(self)[0]

    def mkdir(self, exist_ok: bool = False) -> None:
        """Does nothing: a bucket has no folders."""

    def write_bytes(self, content: bytes) -> None:
        _bucket().write(self, content)

    def unlink(self) -> None:
        _bucket().delete([self])


def is_url(text) -> bool:
    return "://" in str(text)


def is_path(word: str) -> bool:
    """Returns whether a word of a command names a path.

    A word with = is a key, unless that path exists or a slash comes before the =.
    """
    name, equals, _ = word.partition("=")
    return not equals or "/" in name or os.path.exists(word)


def location(text) -> Path | BucketPath:
    """Parses the path or URL in a key or an argument; rejects a bucket if obstore is not installed."""
    if isinstance(text, BucketPath | Path):
        return text
    if not is_url(text):
        return Path(text)
    bucket, match = _bucket(), _URL.fullmatch(text)
    if not match or match[1] not in bucket.SCHEMES:
        known = " and ".join(f"{scheme}://BUCKET/FOLDER" for scheme in bucket.SCHEMES)
        raise UsageError(f"{text} is not a supported location; give a folder on a disk, or {known}")
    if not match[2] or not match[3]:
        raise UsageError(f"{text} names no folder in a bucket; give {match[1]}://BUCKET/FOLDER")
    if {".", ".."} & set(match[3].split("/")):  # plain names in a bucket, but they would leave the local cache
        raise UsageError(f"{text} has . or .. in its path, which a bucket does not know; leave them out")
    bucket.check_installed(text)
    return BucketPath(*match.groups())


def read_small(path: Path | BucketPath) -> bytes:
    """Reads a settings file on a disk or in a bucket; raises OSError if it exceeds files.MAX_BYTES."""
    if isinstance(path, Path):
        return files.read_bytes(path)
    content = _bucket().read(path, files.MAX_BYTES)[0]
    if len(content) > files.MAX_BYTES:
        raise OSError(errno.EFBIG, f"It has more than the {files.MAX_BYTES:,} bytes of such a file", str(path))
    return content


def is_same(one, other) -> bool:
    """Returns whether two names denote the same path."""
    one, other = location(one), location(other)
    return one == other or (isinstance(one, Path) and isinstance(other, Path) and one.resolve() == other.resolve())


def on_disk(text, key: str) -> Path:
    """Returns the file or folder that a key names; rejects URLs."""
    if is_url(text):
        raise UsageError(f"{key}={text} must be on a disk; name a path there, and copy it to the bucket afterwards")
    return Path(files.expand_home(text))


def new_file_on_disk(text, key: str, suffixes: tuple[str, ...] = ()) -> Path:
    """Returns the output file that a key names; checks before the command's work that it can be written."""
    path = on_disk(text, key)
    if text and suffixes and path.suffix.lower() not in suffixes:
        raise UsageError(f"{key} takes the name of a file that ends in {', '.join(suffixes)}; got {text!r}")
    if not path.parent.is_dir():
        raise UsageError(f"{key}={text}: folder {path.parent} does not exist; make it first")
    if text and path.is_dir():
        raise UsageError(f"{key}={text} is a folder; name a file")
    return path


def local_folder(path: Path | BucketPath) -> Path:
    """Returns the folder in which a run writes its records: for a bucket, a folder in this machine's cache."""
    return _folder_in_cache(path, "runs")


def reading_folder(path: Path | BucketPath) -> Path:
    """Returns the folder in which commands read a run's records; the run may write `local_folder` meanwhile."""
    return _folder_in_cache(path, "read")


def _folder_in_cache(path: Path | BucketPath, use: str) -> Path:
    return path if isinstance(path, Path) else cache_folder() / use / path.scheme / path.bucket / path.key


def cache_folder() -> Path:
    """Returns this machine's cache, which contains only files that can be rebuilt or downloaded.

    Without a home folder (HOME unset, and a user that the system does not know) it is a private temporary folder.
    """
    base = os.environ.get("SHARDFORMER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "shardformer"
    folder = Path(os.path.expanduser(base))
    return _make_private_folder() if folder.parts[:1] == ("~",) else folder


def _make_private_folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"shardformer-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UsageError(f"HOME is not set, and {folder} belongs to another user; set SHARDFORMER_CACHE to a folder")
    return folder
