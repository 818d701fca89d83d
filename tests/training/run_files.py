"""Prints the files of the package whose code runs while a step is traced, for each configuration of a JSON list.

A process of its own, because code that a test before has traced is not traced again.
"""

import json
import sys
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

    def note(frame, event, argument):
        paths.add(frame.f_code.co_filename)

    sys.settrace(note)
    try:
        trainer.lower(state, batch)
    finally:
        sys.settrace(None)
    return sorted(str(Path(path).relative_to(PACKAGE)) for path in paths if Path(path).is_relative_to(PACKAGE))


def main() -> None:
    mesh.use_cpu_devices(8)
    print(json.dumps([find_files(**overrides) for overrides in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
