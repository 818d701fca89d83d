"""The lock of a run folder in a bucket: `.lock` names its run, which renews it while it lives.

Every write compares and swaps the object's version, so that two runs can never both succeed. No clocks are compared: a
run that finds another run's lease measures by its clock whether the lease is renewed.
"""

import contextlib
import json
import secrets
import threading
import time

from shardformer.checkpoint.lock import NAME
from shardformer.checkpoint.lock_owner import Owner, is_known_dead, parse_owner, this_process
from shardformer.checkpoint.store import FolderLost, FolderTaken, Lock, LockTimes
from shardformer.errors import RunError
from shardformer.messages import log
from shardformer.storage import BucketPath, bucket

TIMES = LockTimes(renew=5, expire=30, watch=0.5)
ATTEMPTS = 3  # to acquire a lease whose object is deleted meanwhile


class Lease(Lock):
    """The lock of a run folder in a bucket."""

    def __init__(self, out: BucketPath, times: LockTimes = TIMES):
        self._out, self._path, self._times = out, out / NAME, times
        self._version: bucket.Version = {}
        self._name = secrets.token_hex(8)  # in every record of this lease
        self._swap = threading.Lock()  # held during a renewal: the thread and `renew` both renew
        self._lost = ""
        self._released = threading.Event()
        self._renewing = threading.Thread(target=self._renew_until_released, daemon=True)

    def __enter__(self) -> "Lease":
        try:
            self._acquire()
        except OSError as error:
            raise RunError(f"cannot write in {self._out}: {error.strerror}; give another folder as out=") from None
        self._renewing.start()
        return self

    def __exit__(self, *_) -> None:
        self._released.set()
        self._renewing.join()
        with contextlib.suppress(OSError):  # the object stays: deleting it could delete another run's
            self._replace_record(make_record(self._name, free=True))

    def check_still_locked(self) -> None:
        if self._lost:
            raise FolderLost(self._lost)

    def renew(self) -> None:
        with self._swap:
            self.check_still_locked()
            try:
                self._replace_record(make_record(self._name))
            except (bucket.ChangedError, FileNotFoundError):
                self._lost = self._describe_loss()
        self.check_still_locked()

    def _replace_record(self, record: bytes) -> None:
        """Swaps the record of this lease; raises ChangedError if another run has replaced it.

        A renewal that failed may be carried out all the same, even after the next one was sent.
        """
        try:
            self._version = bucket.swap(self._path, record, self._version)
        except bucket.ChangedError:
            current, version = bucket.read(self._path)
            if self._name.encode() not in current:
                raise
            self._version = bucket.swap(self._path, record, version)

    def _describe_loss(self) -> str:
        try:
            owner, _ = self._read_owner()
        except FileNotFoundError:
            return f"{self._path} was deleted while this run was training"
        return f"{owner if owner.host else 'another run'} has taken {self._out} over"

    def _renew_until_released(self) -> None:
        while not self._released.wait(self._times.renew):
            with contextlib.suppress(OSError, FolderLost):  # the next write reports it
                self.renew()

    def _acquire(self) -> None:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(FileNotFoundError):  # deleted between two requests: it can be created now
                return self._create_or_take_over()
        self._create_or_take_over()

    def _create_or_take_over(self) -> None:
        with contextlib.suppress(bucket.ChangedError):
            self._version = bucket.create(self._path, make_record(self._name))
            return
        owner, version = self._read_owner()
        if owner.host and not is_known_dead(owner):
            version = self._wait_until_released(owner, version)
        try:
            self._version = bucket.swap(self._path, make_record(self._name), version)
        except bucket.ChangedError:
            raise FolderTaken(f"another run has just begun in {self._out}; give this one another out=") from None

    def _wait_until_released(self, owner: Owner, version: bucket.Version) -> bucket.Version:
        """Returns the version of the record to replace: the expired one, or the one that released the folder."""
        log.info(f"{self._out} was last used by {owner}: waiting up to {self._times.expire} s "
                  "to see whether that run is still alive")  # fmt: skip
        end = time.monotonic() + self._times.expire
        while time.monotonic() < end:
            time.sleep(self._times.watch)
            holder, current = self._read_owner()
            if current != version and not holder.host:
                return current
            if current != version:
                raise FolderTaken(f"{self._out} is in use by {owner}; stop that run, or give this one another out=")
        return version

    def _read_owner(self) -> tuple[Owner, bucket.Version]:
        """Returns the owner, an empty one if the folder is free, and the version of the record."""
        content, version = bucket.read(self._path)
        return parse_owner(content), version


def make_record(lease: str, free: bool = False) -> bytes:
    """Returns a unique record, so that a run recognizes it if the answer to its request is lost."""
    owner = Owner() if free else this_process()
    return json.dumps(owner._asdict() | {"lease": lease, "nonce": secrets.token_hex(8)}).encode()
