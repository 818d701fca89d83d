"""Prints the files of the package whose code runs while a step is traced, for each configuration of a JSON list.

A process of its own, because code that a test before has traced is not traced again.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from shardformer import Trainer, preset
from shardformer.layout import mesh

PACKAGE = Path(mesh.__file__).parents[1]


def find_files(**overrides) -> list[str]:
    """Returns the files that run within `Trainer.lower`."""
    jax.clear_caches()
    config = preset("tiny").replace(vocab=61, **overrides)
    trainer = Trainer(config, mesh.make(config))
    batch, paths = trainer.abstract_batch, set()
    state = trainer.abstract

    with noting(paths):
        trainer.lower(state, batch)
    return sorted(str(Path(path).relative_to(PACKAGE)) for path in paths if Path(path).is_relative_to(PACKAGE))


@contextlib.contextmanager
def noting(paths: set[str]) -> Iterator[None]:
    """Adds the files of the functions that start within the block."""

    def note(frame, event, argument):
        paths.add(frame.f_code.co_filename)

    def note_once(code, offset):
        paths.add(code.co_filename)
        return sys.monitoring.DISABLE

    if not hasattr(sys, "monitoring"):  # Python 3.11
        sys.settrace(note)
        try:
            yield
        finally:
            sys.settrace(None)
        return
    tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
    sys.monitoring.use_tool_id(tool, __name__)
    try:
        sys.monitoring.register_callback(tool, events.PY_START, note_once)
        sys.monitoring.set_events(tool, events.PY_START)
        sys.monitoring.restart_events()  # functions that an earlier block has noted
        yield
    finally:
        sys.monitoring.set_events(tool, events.NO_EVENTS)
        sys.monitoring.free_tool_id(tool)


def main() -> None:
    mesh.use_cpu_devices(8)
    print(json.dumps([find_files(**overrides) for overrides in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
