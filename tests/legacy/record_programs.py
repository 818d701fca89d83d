"""Writes down what each program of programs/ gives: `python tests/legacy/record_programs.py FOLDER` with an old jax.

One file per jax version, one line per program: its tree, dtypes, shapes and values, or the name of its error.
"""

import json
import os
import pathlib
import sys
import warnings

import jax
import numpy as np


def written(array):
    """A leaf as JSON: the shortest decimals that read back as the same values."""
    array = np.asarray(array)
    values = array.view(array.real.dtype) if np.iscomplexobj(array) else array
    decimal = float if array.dtype.name in ("float16", "bfloat16") else lambda value: float(str(value))
    number = int if array.dtype.kind in "iub" else decimal
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": [number(value) for value in values.ravel()]}


def read(leaf):
    """The array that `written` wrote; a dtype that numpy does not know comes back as float32."""
    dtype = np.dtype("float32" if leaf["dtype"] == "bfloat16" else leaf["dtype"])
    part = np.zeros((), dtype).real.dtype
    return np.array(leaf["data"], part).view(dtype).reshape(leaf["shape"])


def outcome(program):
    """{"tree", "leaves"} of what the program returns, or {"error", "kinds", "message"} of what it raised."""
    try:
        leaves, tree = jax.tree_util.tree_flatten(program())
        return {"tree": str(tree), "leaves": [written(leaf) for leaf in leaves]}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": kinds[0], "kinds": kinds, "message": str(error)}


def record(programs):
    lines = []
    for name, program in programs.items():
        found = outcome(program)
        kept = {key: found[key] for key in ("error", "tree", "leaves") if key in found}
        lines.append(f"{json.dumps(name)}: {json.dumps(kept, separators=(',', ':'))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(folder):
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from tests.legacy.programs import PROGRAMS

    path = pathlib.Path(folder, f"programs_{jax.__version__}.json")
    path.write_text(record(PROGRAMS))
    print(f"{len(PROGRAMS)} programs written to {path}")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    main(*sys.argv[1:])
