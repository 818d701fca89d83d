"""The bounds of one server."""

import dataclasses
import resource

MOST_CONNECTIONS = 4096


def count_connections() -> int:
    """Returns how many connections may be open: half of the descriptors, as checkpoints and templates need some too."""
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, MOST_CONNECTIONS)


@dataclasses.dataclass
class Limits:
    """The bounds of one server, which keep it answering whatever its clients do."""

    seconds: float = 600.0  # of one request
    header_seconds: float = 10.0  # from the connection, or the last answer, to the end of a request's headers
    body_seconds: float = 60.0
    body_bytes: int = 10_000_000
    bodies_bytes: int = 160_000_000  # of all bodies that arrive or wait to be encoded
    connections: int = dataclasses.field(default_factory=count_connections)
