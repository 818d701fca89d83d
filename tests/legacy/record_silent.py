"""Writes what silent_programs.py gives to goldens/silent_VERSION.json: `python tests/legacy/record_silent.py`.

Needs jax, optax and dm-haiku only: it ran with jax 0.4.13, optax 0.1.5 and dm-haiku 0.0.9 on Python 3.10.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def flat_result(source: str) -> list:
    """Returns the dtype, the shape and the numbers of each array that a program assigns to `result`."""
    import jax
    import numpy as np

    scope: dict = {}
    exec(source, scope)
    found = []
    for leaf in jax.tree_util.tree_leaves(scope["result"]):
        array = np.asarray(leaf)
        numbers = np.stack([array.real, array.imag]) if array.dtype.kind == "c" else array
        found.append([str(array.dtype), list(array.shape), [str(number) for number in numbers.ravel().tolist()]])
    return found


def run_all(programs) -> dict[str, list[list]]:
    """Returns the results of both programs of each pair."""
    import jax

    partitionable = jax.__version_info__ >= (0, 5)
    results = {}
    for name, pair in programs.PROGRAMS.items():
        found = []
        for source in pair:
            jax.config.update("jax_threefry_partitionable", partitionable)
            jax.config.update("jax_default_prng_impl", "threefry2x32")
            found.append(flat_result(programs.IMPORTS + source))
        results[name] = found
    return results


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    spec = importlib.util.spec_from_file_location("silent_programs", HERE / "silent_programs.py")
    assert spec is not None
    assert spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    sys.modules["silent_programs"] = programs
    spec.loader.exec_module(programs)
    rows = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in run_all(programs).items()]
    (HERE / "goldens" / f"silent_{jax.__version__}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
