"""Arrows between rooms point one way: what each room of the package may import, and that importing it stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shardformer"

# From the bottom up: a package may import itself and the packages above it in this table.
LAYERS = (
    ("errors",),
    ("files", "tables"),
    ("config", "storage"),
    ("kernels",),
    ("context",),
    ("hardware", "programs", "shards"),
    ("distributed", "data"),
    ("checkpoint", "parallel"),
    ("model", "logs"),
    ("inference", "optim"),
    ("run",),
    ("guard", "monitor"),
    ("training",),
    ("analysis", "convert", "legacy"),
    ("bench", "course"),
    ("cli",),
    ("__main__",),
)
# Packages that may import exactly these, whatever lies above them.
ALLOWED = {"legacy": {"errors", "files", "tables", "distributed", "config"}}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "shardformer":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardformer."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("shardformer.")}
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
    assert wrong_imports("legacy", "from shardformer import model, files") == ["legacy imports model"]
    assert wrong_imports("optim", "def f():\n    from shardformer.training.step import Trainer") == [
        "optim imports training"
    ]


def test_a_file_name_means_one_thing():
    names = [path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_shard_view_knows_no_whole_arrays():
    for path in [*(PACKAGE / "shards").glob("*.py"), *(PACKAGE / "kernels").glob("*.py")]:
        assert not {"NamedSharding", "shard_map("} & set(path.read_text().split()), path


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
