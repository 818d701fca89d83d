"""A bad connection at the boundary of obstore: requests that never arrive, and answers that never do."""

import random
from collections import Counter
from collections.abc import Callable, Iterator

import obstore
import pytest
from obstore.exceptions import GenericError

REQUESTS = ("put", "get", "get_range", "head", "list", "delete")
RESET = "Generic S3 error: Error performing PUT http://h/b/k in 304.2µs - HTTP error: error sending request"


class BadConnection:
    """Replaces obstore's functions: each call is lost with the probability `rate`, half of them after its work.

    Each kind of request has its own random numbers: a lease's thread and a save send requests in no fixed order.
    """

    def __init__(self, rate: float, seed: int = 0):
        self.rate, self.faults = rate, Counter[str]()
        self._draws = {kind: random.Random(f"{seed} {kind}") for kind in (*REQUESTS, "create", "swap")}

    def install(self, patch: pytest.MonkeyPatch) -> "BadConnection":
        for name in REQUESTS:
            patch.setattr(obstore, name, self._disturb(name, getattr(obstore, name)))
        return self

    def _disturb(self, name: str, request: Callable) -> Callable:
        def call(*arguments, **options):
            mode = options.get("mode")
            kind = name if mode in (None, "overwrite") else "create" if mode == "create" else "swap"
            draw = self._draws[kind].random
            if draw() >= self.rate:
                return request(*arguments, **options)
            if draw() < 0.5:
                self.faults[f"{kind} reset"] += 1
                raise GenericError(RESET)
            if name == "list":
                return self._stop_listing(request(*arguments, **options))
            request(*arguments, **options)
            self.faults[f"{kind} answer lost"] += 1
            raise GenericError(RESET)

        return call

    def _stop_listing(self, chunks: Iterator) -> Iterator:
        for chunk in chunks:
            self.faults["list answer lost"] += 1
            yield chunk[: len(chunk) // 2]
            raise GenericError("Generic S3 error: Error getting list response body: HTTP error: body error")


class Scripted(BadConnection):
    """A connection that loses only the first call of each function."""

    def __init__(self, answer_lost: bool):
        super().__init__(1.0)
        self._answer_lost = answer_lost
        self._seen: set[str] = set()

    def _disturb(self, name: str, request: Callable) -> Callable:
        def call(*arguments, **options):
            if name in self._seen:
                return request(*arguments, **options)
            self._seen.add(name)
            if self._answer_lost:
                request(*arguments, **options)
            raise GenericError(RESET)

        return call
