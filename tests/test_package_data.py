"""The files of an installed package: those beside its modules that code or users read, and nothing outside of it."""

import ast
import fnmatch
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardformer"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def is_installed(path: Path, package_data: dict[str, list[str]]) -> bool:
    """Returns whether the wheel has a file of the package, which may lie in a folder without modules."""
    if path.suffix == ".py":
        return True
    folder = path.parent.relative_to(ROOT)
    if not (path.parent / "__init__.py").exists():
        return False
    patterns = package_data.get("*", []) + package_data.get(".".join(folder.parts), [])
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)


def walk(source: str) -> Iterator[ast.AST]:
    """Returns the nodes of a module that names its file, and none of others: parsing takes all of the time."""
    return ast.walk(ast.parse(source)) if "__file__" in source else iter(())


def find_neighbours(source: str) -> set[str]:
    """Returns the names of files that a module opens by `Path(__file__).with_name(NAME)`."""
    calls = [node for node in walk(source) if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "with_name"
        and "__file__" in ast.unparse(call.func.value)
        and isinstance(call.args[0], ast.Constant)
    }


def find_paths(path: Path) -> list[Path]:
    """Returns the folders that a module derives from its file by `Path(...__file__...).parents[N]`."""
    nodes = [node for node in walk(path.read_text()) if isinstance(node, ast.Subscript)]
    texts = [ast.unparse(node) for node in nodes]
    return [
        (path if "(__file__)" in text else PACKAGE / "__init__.py").parents[int(text.rpartition("[")[2].rstrip("]"))]
        for text in texts
        if "__file__" in text and ".parents[" in text and text.endswith("]")
    ]


def list_tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "shardformer"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("did not run: this is no git checkout")
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_wheel_has_every_file_of_the_package():
    missing = [path for path in list_tracked() if not is_installed(path, SETTINGS["package-data"])]
    assert missing == [], "add them to package-data in pyproject.toml"


def test_file_without_an_entry_is_noticed():
    assert not is_installed(PACKAGE / "inference/serve/page.html", {"*": ["README.md"], "shardformer": ["page.html"]})
    assert not is_installed(PACKAGE / "no_module_here/data.json", {"*": ["data.json"]})


def test_each_entry_has_a_file():
    """A renamed file would leave its entry behind, and the wheel without it."""
    for package, patterns in SETTINGS["package-data"].items():
        folder = ROOT / package.replace(".", "/") if package != "*" else PACKAGE
        assert all(list(folder.glob(pattern)) for pattern in patterns), package


def test_files_that_modules_open_are_installed():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        found |= {path.with_name(name): path for name in find_neighbours(path.read_text())}
    assert {path.name for path in found} >= {"page.html", "template_worker.py"}
    assert all(path.exists() and is_installed(path, SETTINGS["package-data"]) for path in found)


def test_no_module_reads_outside_of_the_package():
    """`parents[1]` of a module at the top is the folder for sys.path, which an installed package has too."""
    outside = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(not folder.is_relative_to(PACKAGE) for folder in find_paths(path))
    }
    assert outside == {"child_process.py", "legacy/spawned_script.py"}  # both extend sys.path
    assert find_paths(PACKAGE / "config" / "registries.py") == [PACKAGE]
