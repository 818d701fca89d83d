"""Messages to the user of a running program, by Python's logging.

`log.info` goes to standard output, of the first process only; `log.warning` to standard error. A notebook silences both
by `logging.getLogger("shardformer").setLevel("ERROR")`, before or after the import. A handler that is added there
receives every message, and each logged step of a run: from `shardformer.steps`, with its metrics as `record.row`.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator


class _Printer(logging.Handler):
    def __init__(self):
        super().__init__()
        self.show: Callable[[str], object] = _print_line

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == steps.name:
            return
        if record.levelno >= logging.WARNING:
            print(self.format(record), file=sys.stderr, flush=True)  # the stream of the moment: tests replace it
        elif is_first_process():
            self.show(self.format(record))


def _print_line(text: str) -> None:
    print(text, flush=True)


def is_first_process() -> bool:
    """Returns True for the first of several processes, and for the only one, without asking for its devices."""
    jax = sys.modules.get("jax")  # not imported by the commands that need no device
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


log = logging.getLogger("shardformer")
steps = log.getChild("steps")  # a row of metrics each, which a display shows in its own form
_printer = _Printer()
log.addHandler(_printer)
if log.level == logging.NOTSET:  # else the user's, of before this import
    log.setLevel(logging.INFO)
log.propagate = False  # else a handler of the root would print each message a second time


def log_step(row: dict) -> None:
    """Logs the metrics of a step to the handlers that a program adds; nothing is printed."""
    values = " ".join(f"{name}={value:.6g}" for name, value in row.items() if value is not None)
    steps.info(values, extra={"row": row})


@contextlib.contextmanager
def printed_by(show: Callable[[str], object]) -> Iterator[None]:
    """Within the block `show` prints what goes to standard output: above a progress bar, say."""
    before, _printer.show = _printer.show, show
    try:
        yield
    finally:
        _printer.show = before


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Within the block nothing is printed."""
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
