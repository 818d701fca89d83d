"""Runs the seed notebook's xmap cells in the order of `notebook_cells.txt`; as a script, records what they gave.

python tests/legacy/record_notebook.py tests/legacy/goldens/notebook.npz   (jax 0.4.13, dm-haiku 0.0.5, optax 0.0.9)
"""

import ast
import os
import re
import sys
import tempfile
from pathlib import Path

CELLS = Path(__file__).with_name("notebook_cells.txt")
TRAINING_STEPS = 5
TENSORFLOW_CELLS = ("54", "58")

# What a run without a shell and on a small CPU must say differently: shell magics, the image library, sizes. Cell 44
# leaves its tokens in a comment, because the author's session still held them.
REPLACED = {
    "2": {"from PIL import Image\n": ""},
    "3": {"!go tool pprof -png memory.prof": "pass", "!go tool pprof -tags memory.prof": "pass"},
    "8": {"batch = 16384": "batch = 16", "embed = 4096": "embed = 8", "w_hidden = 8192": "w_hidden = 32"},
    "11": {"'n_vocab': 5000": "'n_vocab': 32", "'n_head' : 12": "'n_head' : 4", "'d_model' : 768": "'d_model' : 16"},
    "13": {"(16, 32, 768)": "(16, 8, 16)"},
    "44": {
        "'n_vocab': 5000": "'n_vocab': 32",
        "'block_size': 32": "'block_size': 8",
        "'d_model' : 768*4": "'d_model' : 16",
        "# x = jax.random.uniform(next(key), (16, 32), minval=0, maxval=255)": (
            "x = jax.random.uniform(next(key), (16, 8), minval=0, maxval=32)"
        ),
    },
}


class Notebook:
    """The cells by their number, and the one namespace that they share."""

    def __init__(self, replaced=REPLACED):
        self.cells = dict(
            re.findall(r"^In \[(\d+)\]:\n(.*?)(?=^In \[|\Z)", CELLS.read_text(), re.MULTILINE | re.DOTALL)
        )
        self.namespace = {}
        for number, pairs in replaced.items():
            for old, new in pairs.items():
                self.edit(number, old, new)

    def edit(self, number, old, new):
        assert old in self.cells[number], f"cell {number} does not say {old!r}"
        self.cells[number] = self.cells[number].replace(old, new)

    def run(self, *numbers):
        """Runs these cells; returns the value of the last one's last expression, as a notebook shows it."""
        for number in numbers:
            body = ast.parse(self.cells[number]).body
            shown = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), self.namespace)
            value = shown and eval(compile(ast.Expression(shown.value), f"cell {number}", "eval"), self.namespace)
        return value


def outputs(notebook):
    """The arrays that the cells leave behind, by name; runs in the current folder, where cell 37 makes `model`."""
    import jax
    import numpy as np

    shared, found = notebook.namespace, {}

    def keep(name, tree):
        leaves = jax.tree_util.tree_leaves(tree)
        found.update({f"{name}.{i:02}": np.array(leaf) for i, leaf in enumerate(leaves)})

    notebook.run("2", "3", "7", "8", "9", "10")
    keep("matmult", shared["out"])
    notebook.run("11", "12", "13")
    keep("layer_params", shared["state"])
    keep("layer_output", shared["o"])
    notebook.run("14", "15")
    keep("loss_example", shared["logit"])
    notebook.run("16", "17", "44")
    keep("initial_params", shared["state"]["params"])
    keep("logits", shared["o"])
    for step in range(TRAINING_STEPS):
        notebook.run("49")
        keep(f"losses_{step}", shared["loss"])
    trained = notebook.run("33")[0]
    keep("trained", trained)
    notebook.run("48", "34")
    keep("process_count", notebook.run("43"))
    notebook.run("37", "40")
    shared["state"] = None
    notebook.run("47")
    restored = jax.tree_util.tree_leaves(shared["state"])
    keep("restored_is_what_was_saved", len(restored) == len(trained) and all(map(np.array_equal, trained, restored)))
    notebook.run("49")
    keep("losses_after_restore", shared["loss"])
    return found


def _put_back_what_jax_0_4_13_had_lost():
    """The spellings of the notebook's time: `mesh`, a list of out_axes for a tuple of results, `tree_multimap`."""
    import jax
    from jax.experimental import maps

    def mesh(devices, axis_names):
        return jax.sharding.Mesh(devices, axis_names)

    def xmap(*args, out_axes, **kwargs):
        lists = isinstance(out_axes, list) and any(isinstance(spec, list) for spec in out_axes)
        return modern_xmap(*args, out_axes=tuple(out_axes) if lists else out_axes, **kwargs)

    modern_xmap = maps.xmap
    maps.mesh, maps.xmap = mesh, xmap
    jax.tree_multimap = jax.tree_util.tree_map


def main(golden):
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    _put_back_what_jax_0_4_13_had_lost()
    import numpy as np

    golden = Path(golden).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = outputs(Notebook())
        os.chdir(golden.parent)
    np.savez_compressed(golden, **found)
    print(f"{golden.name}: {len(found)} arrays, {golden.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
