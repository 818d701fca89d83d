"""Sends requests to a bucket until they are answered, and reports failures as OSErrors with advice."""

import contextlib
import errno
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

from shardformer.messages import log

# obstore's retries. It never repeats conditional puts, deletions and interrupted listings: `send` does.
RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


class Patience(NamedTuple):
    """The seconds for which requests without an answer are repeated."""

    most: float = 180  # after which a request fails
    first: float = 30  # the same for a bucket that has never answered: its address may be wrong
    silence: float = 10  # after which the user is informed
    pause: float = 0.1  # before the second attempt; doubled each time, with jitter
    longest_pause: float = 5.0


PATIENCE = Patience()


class Advice(NamedTuple):
    """The advice of error messages about one kind of bucket."""

    log_in: str
    renew: str  # credentials that have expired
    address: str  # the name of the setting


ADVICE = {
    "gs": Advice(
        "log in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS",
        "log in again: gcloud auth application-default login",
        "gcs_base_url in GOOGLE_SERVICE_ACCOUNT_KEY",
    ),
    "s3": Advice(
        "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
        "log in again (aws sso login), or set new AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL",
    ),
}

# Error codes of the servers, as in <Error><Code>...</Code><Message>...</Message></Error>.
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired"}
_WRONG_LOGIN = {"AccessDenied", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
_WRONG_CLOCK = {"RequestTimeTooSkewed"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}  # of Ceph and MinIO
_OVERLOADED = {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
# Another request for the object was in progress; S3 asks clients to repeat theirs.
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted"}

_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_STATUS = re.compile(r"status code: ((\d{3})[^:\n]*)")
_TIMINGS = re.compile(r" in [\d.]+[mµn]?s\b|, after \d+ retries|, max_retries: \d+|, retry_timeout: \w+")
_SERVER = re.compile(r"https?://[^/\s]+")
_CREDENTIALS = re.compile(r"169\.254\.169\.254|metadata\.google|token|redential")  # of obstore's search for them
_KINDS = {"kind: Connect": "no connection", "kind: Timeout": "no answer in time"}  # of obstore's HttpError

Answer = TypeVar("Answer")
_answered: set[str] = set()  # buckets whose last request was answered
_silent: set[str] = set()  # buckets whose silence was announced


class Address(Protocol):
    """The parts of a BucketPath that a request uses."""

    @property
    def scheme(self) -> str: ...

    @property
    def bucket(self) -> str: ...

    @property
    def key(self) -> str: ...


class ChangedError(OSError):
    """The object exists already, or has another version than expected."""


class UnansweredError(OSError):
    """The request may have been carried out or not: the connection failed or the server was overloaded."""


def send(path: Address, call: Callable[[], Answer]) -> Answer:
    """Calls a function that sends one request, and repeats it while it gets no answer; raises an OSError if it fails.

    Repeating the request must do no harm: after a lost answer it was carried out already.
    """
    name = _name(path)
    patience = PATIENCE.most if name in _answered else PATIENCE.first
    with _announce_silence(name, patience):
        try:
            answer = _repeat(path, call, time.monotonic() + patience)
        except UnansweredError:
            _answered.discard(name)
            raise
        except OSError:
            _note_answer(name)
            raise
    _note_answer(name)
    return answer


def _repeat(path: Address, call: Callable[[], Answer], end: float) -> Answer:
    pause = PATIENCE.pause
    while True:
        try:
            with translate_errors(path):
                return call()
        except UnansweredError:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, PATIENCE.longest_pause)


@contextlib.contextmanager
def _announce_silence(name: str, patience: float) -> Iterator[None]:
    """Prints one line if the block runs longer than PATIENCE.silence."""
    timer = threading.Timer(PATIENCE.silence, _print_silence, (name, patience))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_silence(name: str, patience: float) -> None:
    if name not in _silent:
        _silent.add(name)
        log.warning(f"{name} has not answered for {PATIENCE.silence} s; trying for {patience} s")


def _note_answer(name: str) -> None:
    _answered.add(name)
    if name in _silent:
        _silent.discard(name)
        log.warning(f"{name} answers again")


@contextlib.contextmanager
def translate_errors(path: Address) -> Iterator[None]:
    """Raises obstore's errors as OSErrors of one line."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        message = f"The bucket {path.bucket} does not exist; create it first" if "NoSuchBucket" in str(error) else ""
        raise FileNotFoundError(errno.ENOENT, message or "No such object", str(path)) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        if _first_group(_CODE, str(error)) in _CONFLICT:
            raise _make_error(str(error), path, denied=False) from None
        raise ChangedError(errno.EEXIST, "The object was written by another", str(path)) from None
    except exceptions.BaseError as error:
        denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        raise _make_error(str(error), path, denied) from None


def _make_error(text: str, path: Address, denied: bool) -> OSError:
    """Chooses the kind of error and its advice by obstore's text, as its classes are few."""
    first_line = text.partition("\n")[0]
    code, message, status = (_first_group(pattern, text) for pattern in (_CODE, _MESSAGE, _STATUS))
    number = int(status[:3] or 0)
    reason = f"{code}: {message}" if code else _TIMINGS.sub("", first_line)[:300]
    advice = ADVICE[path.scheme]
    dropped = not number and "HTTP error" in text
    if code in _EXPIRED:
        return PermissionError(errno.EACCES, f"The credentials have expired; {advice.renew}", str(path))
    if code in _WRONG_CLOCK:
        return PermissionError(errno.EACCES, "This machine's clock is wrong; set it (timedatectl)", str(path))
    if code in _FULL or number == 507:
        text = f"The bucket is full ({code or status}); free some space, or raise its quota"
        return OSError(errno.ENOSPC, text, str(path))
    if denied or code in _WRONG_LOGIN:
        return PermissionError(errno.EACCES, f"{reason}; {advice.log_in}", str(path))
    if _CREDENTIALS.search(first_line) and not (dropped and _name(path) in _answered):
        return OSError(errno.EIO, f"{reason}; {advice.log_in}", str(path))
    if dropped or code in _OVERLOADED | _CONFLICT or number in (408, 429) or number >= 500:
        kind = next((words for kind, words in _KINDS.items() if kind in text), "the connection was interrupted")
        server = _first_group(_SERVER, first_line) or _name(path)
        return UnansweredError(
            errno.EIO,
            f"{server}: {code or status or kind}; check the network, and {advice.address} if it is set",
            str(path),
        )
    return OSError(errno.EIO, reason, str(path))


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    """Returns the first group of the first match, or "" without one."""
    result = pattern.search(text)
    return (result[1] if pattern.groups else result[0]) if result else ""


def _name(path: Address) -> str:
    return f"{path.scheme}://{path.bucket}"
