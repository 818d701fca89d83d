"""Arrows between rooms point one way: what each room of the package may import, and that importing it stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shardformer"

# From the bottom up: a package may import itself and the packages above it in this table. A module with a line of its
# own is imported by packages below that of its folder.
LAYERS = (
    ("errors",),
    ("files", "jax_releases", "tables"),
    ("config", "storage"),
    ("parallel.collectives",),
    ("kernels",),
    ("devices",),
    ("data",),
    ("parallel",),
    ("layout",),
    ("checkpoint", "shards"),
    ("model", "logs"),
    ("inference", "optim"),
    ("training",),
    ("analysis", "convert", "legacy"),
    ("session",),
    ("bench", "course"),
    ("cli",),
    ("__main__",),
)
# Packages that may import exactly these, whatever lies above them.
ALLOWED = {"legacy": {"errors", "files", "jax_releases", "tables", "devices", "config"}}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return find_room(".".join(parts))


def find_room(module: str) -> str:
    """Returns the entry of LAYERS that a module without the leading package belongs to."""
    first_two = ".".join(module.split(".")[:2])
    return first_two if first_two in LEVEL else module.split(".")[0]


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "shardformer":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardformer."):
            below = node.module.removeprefix("shardformer.")
            rooms |= {find_room(f"{below}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("shardformer.")]
            rooms |= {find_room(name.removeprefix("shardformer.")) for name in names}
    return rooms


def wrong_imports(importer: str, source: str) -> list[str]:
    return [
        f"{importer} imports {imported}"
        for imported in sorted(imported_rooms(source) - {importer})
        if LEVEL[imported] >= LEVEL[importer] or imported not in ALLOWED.get(importer, LEVEL)
    ]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    if path != PACKAGE / "__init__.py":
        assert not wrong_imports(room(path), path.read_text())


def test_a_wrong_import_is_noticed():
    assert wrong_imports("shards", "from shardformer import model") == ["shards imports model"]
    assert wrong_imports("kernels", "from shardformer.shards import Dropout") == ["kernels imports shards"]
    assert wrong_imports("kernels", "from shardformer.parallel import mesh") == ["kernels imports parallel"]
    assert not wrong_imports("kernels", "from shardformer.parallel import collectives")
    assert not wrong_imports("kernels", "from shardformer.parallel.collectives import vary")
    assert wrong_imports("legacy", "from shardformer import model, files") == ["legacy imports model"]
    assert wrong_imports("optim", "def f():\n    from shardformer.training.trainer import Trainer") == [
        "optim imports training"
    ]


def test_a_file_name_means_one_thing():
    names = [path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def global_names(source: str) -> set[str]:
    """Returns the names of the global view that a source uses: shardings of arrays, and the map from shards to them."""
    names = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return names & {"NamedSharding", "shard_map"}


@pytest.mark.parametrize("package", ["shards", "kernels", "parallel"])
def test_shard_view_knows_no_global_arrays(package):
    for path in (PACKAGE / package).glob("*.py"):
        assert not global_names(path.read_text()), path


def test_names_of_the_global_view_are_noticed():
    assert global_names("f = jax.shard_map(body, mesh=mesh)") == {"shard_map"}
    assert global_names("def f(x): return NamedSharding(x, P())") == {"NamedSharding"}
    assert not global_names('"""Under shard_map( no NamedSharding exists."""')


def test_kernels_know_no_modules():
    for path in (PACKAGE / "kernels").glob("*.py"):
        assert "haiku" not in path.read_text(), path


@pytest.mark.parametrize("words", [["-c", "import shardformer"], ["-m", "shardformer", "--help"]])
def test_import_and_help_are_cheap(words):
    script = "import sys, runpy; sys.argv = ['x', '--help']\n"
    script += (
        "import shardformer\n"
        if "-c" in words
        else "try: runpy.run_module('shardformer', run_name='__main__')\nexcept SystemExit: pass\n"
    )
    script += "print(sorted({'jax', 'tensorflow', 'matplotlib', 'haiku', 'optax'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
