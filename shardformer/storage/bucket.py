"""Objects in a bucket, by obstore: read, write, create, compare and swap, list, delete. Failures are OSErrors."""

import contextlib
import errno
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from shardformer.errors import UsageError

SCHEMES = {"gs": "GCSStore", "s3": "S3Store"}  # to obstore's class
LOG_IN = {
    "gs": "log in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
}
Version = dict[str, str]  # of an object's content: what a swap compares


class Stored(NamedTuple):
    """An object without its content."""

    bytes: int
    version: Version


class ChangedError(OSError):
    """The object is not as it was expected to be: it exists already, or another has written it since."""


def check_installed(text: str) -> None:
    if importlib.util.find_spec("obstore") is None:
        raise UsageError(f"{text} is in a bucket, which needs obstore: pip install 'shardformer[bucket]'")


@functools.cache
def open_bucket(scheme: str, name: str) -> Any:
    """Credentials and endpoints are those of the environment, as for the cloud's own tools."""
    from obstore import store

    return getattr(store, SCHEMES[scheme])(name)


def read(path, max_bytes: int | None = None) -> tuple[bytes, Version]:
    """One byte more than `max_bytes` where the object has more."""
    import obstore

    with _as_os_error(path):
        found = obstore.get(_store(path), path.key)
        if max_bytes is not None and found.meta["size"] > max_bytes:
            return bytes(read_range(path, 0, max_bytes + 1)), _version(found.meta)
        return bytes(found.bytes()), _version(found.meta)


def read_range(path, start: int, length: int):
    """A buffer of so many bytes, or fewer where the object ends."""
    import obstore

    with _as_os_error(path):
        return obstore.get_range(_store(path), path.key, start=start, length=length)


def read_range_of_version(path, start: int, length: int, expected: Version):
    """The same of one version; raises ChangedError where the object has another by now."""
    import obstore

    with _as_os_error(path):
        options = {"range": (start, start + length), "if_match": expected["e_tag"]}
        return obstore.get(_store(path), path.key, options=options).bytes()


def write(path, content) -> Version:
    return _put(path, content, "overwrite")


def create(path, content: bytes) -> Version:
    """Raises ChangedError where the object exists; a put of ours whose answer was lost does not count."""
    return _put_once(path, content, "create")


def swap(path, content: bytes, expected: Version) -> Version:
    """Overwrites the version that is expected; raises ChangedError where it is another."""
    return _put_once(path, content, expected)


def head(path) -> Stored | None:
    import obstore

    try:
        with _as_os_error(path):
            return _describe(obstore.head(_store(path), path.key))
    except FileNotFoundError:
        return None


def list_stored(folder, most: int | None = None) -> dict[str, Stored]:
    """The names of the objects below a folder, relative to it."""
    import obstore

    found, prefix = {}, f"{folder.key}/"
    with _as_os_error(folder):
        for chunk in obstore.list(_store(folder), prefix, chunk_size=most or 1000):
            found |= {entry["path"].removeprefix(prefix): _describe(entry) for entry in chunk}
            if most and len(found) >= most:
                break
    return found


def list_objects(folder, most: int | None = None) -> dict[str, int]:
    """The same with their bytes alone."""
    return {name: stored.bytes for name, stored in list_stored(folder, most).items()}


def delete(paths: Iterable) -> None:
    """Objects that do not exist are passed over."""
    import obstore

    for path in paths:
        with contextlib.suppress(FileNotFoundError), _as_os_error(path):
            obstore.delete(_store(path), path.key)


def _put(path, content, mode) -> Version:
    import obstore

    with _as_os_error(path):
        return _version(obstore.put(_store(path), path.key, content, mode=mode, use_multipart=False))


def _put_once(path, content: bytes, mode) -> Version:
    """The content must be unique: an object that holds it was written by this very call."""
    try:
        return _put(path, content, mode)
    except ChangedError:
        with contextlib.suppress(FileNotFoundError):
            found, version = read(path)
            if found == content:
                return version
        raise


def _store(path) -> Any:
    return open_bucket(path.scheme, path.bucket)


def _version(result) -> Version:
    return {name: result[name] for name in ("e_tag", "version") if result.get(name)}


def _describe(meta) -> Stored:
    return Stored(meta["size"], _version(meta))


@contextlib.contextmanager
def _as_os_error(path) -> Iterator[None]:
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "No such object", str(path)) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise ChangedError(errno.EEXIST, "The object was written by another", str(path)) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, f"{_first_line(error)}; {LOG_IN[path.scheme]}", str(path)) from None
    except exceptions.BaseError as error:
        words = _first_line(error)
        if "token" in words or "redential" in words:  # a search for credentials that failed has no kind of its own
            words += f"; {LOG_IN[path.scheme]}"
        raise OSError(errno.EIO, words, str(path)) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
