"""The counters of the server, and their text for Prometheus."""

import bisect
import dataclasses
import threading

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds


class Histogram:
    """Counts of durations below each bound."""

    def __init__(self):
        self._counts, self._sum, self._lock = [0] * (len(BOUNDS) + 1), 0.0, threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(BOUNDS, seconds)] += 1
            self._sum += seconds

    def lines(self, name: str, meaning: str) -> list[str]:
        lines, total = [f"# HELP {name} {meaning}", f"# TYPE {name} histogram"], 0
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


@dataclasses.dataclass
class ServerMetrics:
    """The counters of a server since its start."""

    requests: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)  # by path and status
    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    rejected: int = 0
    cancelled: int = 0
    steps: int = 0
    reloads: int = 0
    first_token: Histogram = dataclasses.field(default_factory=Histogram)
    duration: Histogram = dataclasses.field(default_factory=Histogram)

    def count_request(self, path: str, status: int) -> None:
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    def as_text(self, gauges: dict[str, tuple[float, str]]) -> str:
        """Returns the exposition format; gauges are (value, meaning) by name."""
        prefix = "shardformer_"
        lines = [f"# HELP {prefix}requests_total answered requests", f"# TYPE {prefix}requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'{prefix}requests_total{{path="{path}",status="{status}"}} {count}')
        counters = {
            "generated_tokens": "tokens drawn",
            "prompt_tokens": "tokens of prompts",
            "prefix_tokens": "tokens that the prefix cache had, so that they were not read again",
            "rejected": "requests that found the queue full",
            "cancelled": "continuations that ended with their client or their time",
            "steps": "steps of the engine",
            "reloads": "checkpoints taken while serving",
        }
        for name, meaning in counters.items():
            full = f"{prefix}{name}_total"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} counter", f"{full} {getattr(self, name)}"]
        for name, (value, meaning) in gauges.items():
            full = f"{prefix}{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} gauge", f"{full} {value}"]
        lines += self.first_token.lines(f"{prefix}first_token_seconds", "from a request to its first token")
        lines += self.duration.lines(f"{prefix}request_seconds", "from a request to its last token")
        return "\n".join(lines) + "\n"
