"""Objects in a bucket, by obstore: read, write, create, compare and swap, list, delete. Failures are OSErrors.

Each request is repeated if its answer is lost. Conditional puts then recognize their content in the object.
"""

import contextlib
import errno
import functools
import importlib.util
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardformer.errors import UsageError
from shardformer.storage.requests import RETRIES, Address, ChangedError, UnansweredError, send

__all__ = ["SCHEMES", "ChangedError", "Stored", "UnansweredError", "Version", "check_installed", "create", "delete"]
__all__ += ["head", "list_objects", "list_stored", "open_bucket", "read", "read_range", "read_range_of_version"]
__all__ += ["swap", "write"]

SCHEMES = {"gs": "GCSStore", "s3": "S3Store"}  # to obstore's class
Version = dict[str, str]  # the ETag or generation of an object's content, which a swap compares


class Stored(NamedTuple):
    """An object without its content."""

    bytes: int
    version: Version
    modified: float  # seconds since 1970


def check_installed(text: str) -> None:
    """Raises UsageError unless obstore is installed."""
    if importlib.util.find_spec("obstore") is None:
        raise UsageError(f"{text} is in a bucket, which needs obstore: pip install 'shardformer[bucket]'")


@functools.cache
def open_bucket(scheme: str, name: str) -> Any:
    """Opens a bucket with the credentials and the endpoint of the environment, as the cloud's tools do."""
    from obstore import store

    return getattr(store, SCHEMES[scheme])(name, retry_config=RETRIES)


def read(path: Address, max_bytes: int | None = None) -> tuple[bytes, Version]:
    """Returns the content and its version; of a larger object, `max_bytes` and one byte more."""
    import obstore

    def get() -> tuple[bytes, Version]:
        result = obstore.get(_store(path), path.key)
        if max_bytes is None or result.meta["size"] <= max_bytes:
            return bytes(result.bytes()), _version(result.meta)
        start = obstore.get_range(_store(path), path.key, start=0, length=max_bytes + 1)
        return bytes(start), _version(result.meta)

    return send(path, get)


def read_range(path: Address, start: int, length: int) -> memoryview:
    """Returns at most `length` bytes: fewer if the object ends before."""
    import obstore

    return send(path, lambda: memoryview(obstore.get_range(_store(path), path.key, start=start, length=length)))


def read_range_of_version(path: Address, start: int, length: int, expected: Version) -> memoryview:
    """Does the same for one version; raises ChangedError if the object has another by now."""
    import obstore

    options: obstore.GetOptions = {"range": (start, start + length), "if_match": expected["e_tag"]}
    return send(path, lambda: memoryview(obstore.get(_store(path), path.key, options=options).bytes()))


def write(path: Address, content) -> Version:
    """Writes an object, whether it exists or not."""
    return _put(path, content, "overwrite")


def create(path: Address, content: bytes) -> Version:
    """Writes a new object; raises ChangedError if it exists. The content must be unique."""
    return _put_once(path, content, "create")


def swap(path: Address, content: bytes, expected: Version) -> Version:
    """Overwrites the expected version; raises ChangedError if the object has another. The content must be unique."""
    return _put_once(path, content, expected)


def head(path: Address) -> Stored | None:
    """Returns the size and version of an object, or None if it does not exist."""
    import obstore

    try:
        return send(path, lambda: _describe(obstore.head(_store(path), path.key)))
    except FileNotFoundError:
        return None
    except UnansweredError:
        raise
    except OSError:
        read_range(path, 0, 1)  # answers to HEAD give no reason for a failure; those to GET do
        raise


def list_stored(folder: Address, most: int | None = None) -> dict[str, Stored]:
    """Returns the objects below a folder, by their names relative to it; at least `most` of them if it has so many."""
    import obstore

    prefix = f"{folder.key}/"

    def list_all() -> dict[str, Stored]:
        result: dict[str, Stored] = {}
        for chunk in obstore.list(_store(folder), prefix, chunk_size=most or 1000):
            result |= {entry["path"].removeprefix(prefix): _describe(entry) for entry in chunk}
            if most and len(result) >= most:
                break
        return result

    return send(folder, list_all)


def list_objects(folder: Address, most: int | None = None) -> dict[str, int]:
    """Returns the bytes of the objects below a folder, by their names relative to it."""
    return {name: stored.bytes for name, stored in list_stored(folder, most).items()}


def delete(paths: Iterable[Address]) -> None:
    """Deletes objects; skips missing ones."""
    import obstore

    def delete_one(path: Address) -> None:
        with contextlib.suppress(FileNotFoundError):
            send(path, lambda: obstore.delete(_store(path), path.key))

    for path in paths:
        delete_one(path)


def _put(path: Address, content, mode) -> Version:
    import obstore

    def put() -> Version:
        try:
            return _version(obstore.put(_store(path), path.key, content, mode=mode, use_multipart=False))
        except FileNotFoundError as error:
            if mode != "create" or "NoSuchKey" not in str(error):
                raise
            # S3 gives this answer to a new object's put during a deletion of the old one.
            raise UnansweredError(errno.EAGAIN, "The object was being deleted", str(path)) from None

    return send(path, put)


def _put_once(path: Address, content: bytes, mode) -> Version:
    """Puts a unique content: if the object has it, an earlier attempt of this put was carried out."""
    try:
        return _put(path, content, mode)
    except ChangedError:
        with contextlib.suppress(FileNotFoundError):
            result, version = read(path)
            if result == content:
                return version
        raise


def _store(path: Address) -> Any:
    return open_bucket(path.scheme, path.bucket)


def _version(result) -> Version:
    return {name: result[name] for name in ("e_tag", "version") if result.get(name)}


def _describe(meta) -> Stored:
    return Stored(meta["size"], _version(meta), meta["last_modified"].timestamp())
