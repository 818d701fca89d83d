"""Prints the files of the package whose code runs while a step is traced, for each configuration of a JSON list.

A process of its own, because code that a test before has traced is not traced again.
"""

import cProfile
import json
import sys
from pathlib import Path

import jax
import numpy as np

from shardformer import Trainer, preset
from shardformer.layout import mesh

PACKAGE = Path(mesh.__file__).parents[1]


def find_files(**overrides) -> list[str]:
    """Returns the files that run while the programs of a step are traced."""
    jax.clear_caches()
    config = preset("tiny").replace(vocab=61, **overrides)
    trainer = Trainer(config, mesh.make(config))
    batch, state = trainer.abstract_batch, trainer.abstract
    paths = map(Path, record(jax.make_jaxpr(trainer.accumulation.step), state, batch, np.int32(0)))
    return sorted(str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE))


def record(function, *arguments) -> set[str]:
    """Calls a function; returns the names of the files whose code runs meanwhile."""
    if sys.version_info < (3, 12):
        profile = cProfile.Profile(builtins=False)
        profile.runcall(function, *arguments)
        return {entry.code.co_filename for entry in profile.getstats() if not isinstance(entry.code, str)}

    files = set()
    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID

    def note(code, _):
        files.add(code.co_filename)
        return monitoring.DISABLE  # once for each function, which takes less than a profile

    monitoring.use_tool_id(tool, "run_files")
    monitoring.register_callback(tool, monitoring.events.PY_START, note)
    monitoring.set_events(tool, monitoring.events.PY_START)
    monitoring.restart_events()
    try:
        function(*arguments)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return files


def main() -> None:
    mesh.use_cpu_devices(8)
    print(json.dumps([find_files(**overrides) for overrides in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
