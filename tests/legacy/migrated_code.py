"""Old code for the tests of `legacy --migrate`, and how they migrate and run it."""

import jax

from shardformer.legacy.migration.migrate import migrate_file

HEAD = "from jax.experimental.maps import Mesh, xmap\n"
SCALE = f"""{HEAD}import jax
f = xmap(lambda x: x * jax.lax.psum(x, "i"), ["i", ...], ["i", ...], axis_resources={{"i": "x"}})
"""


def migrated(tmp_path, source):
    file = tmp_path / "old.py"
    file.write_text(source)
    return migrate_file(file)


def run(source):
    names = {"__name__": "program"}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(source, "program", "exec"), names)
        return jax.tree.leaves(names["run"]())


def load(source):
    names = {"__name__": "program"}
    exec(compile(source, "program", "exec"), names)
    return names
