"""Runs the cells of JAX's own xmap tutorial (docs/xmap_tutorial.md at tag jax-v0.4.30, not kept here).

The golden was recorded under jax 0.4.30, which ran all cells but one, and that one under 0.4.13:
    JAX_XMAP_TUTORIAL=.../xmap_tutorial.md <python of that jax> tests/legacy/xmap_tutorial.py OUTPUTS.json
"""

import ast
import contextlib
import io
import json
import os
import pathlib
import re
import sys


def cells(text):
    """The code cells, without their options."""
    found = re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r"^:.*\n", "", cell, flags=re.MULTILINE) for cell in found]


def outputs(text):
    """Returns the output of each cell, or the name of its error; the cells share their names, as in a notebook."""
    names = {"__name__": "__main__"}
    return [output(ast.parse(cell), names) for cell in cells(text)]


def output(tree, names):
    printed = io.StringIO()
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(tree, "cell", "exec"), names)
            value = eval(compile(ast.Expression(shown.value), "cell", "eval"), names) if shown else None
        except Exception as error:
            return type(error).__name__
    if hasattr(value, "tolist"):
        print(value.tolist(), file=printed)
    return printed.getvalue()


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    found = outputs(pathlib.Path(os.environ["JAX_XMAP_TUTORIAL"]).read_text())
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
