"""Writes goldens/library_names.json: `python tests/legacy/record_library_names.py FOLDER`.

FOLDER has one folder for each release, DISTRIBUTION-VERSION, as `pip install --no-deps --target` makes it. The sources
are read and not imported. Recorded are the names that a release defines, or imports into a package, and that the
newest release does not mention; "*" is a module that is gone.
"""

import ast
import json
import sys
from pathlib import Path

from record_public_names import SKIPPED, _statements

LIBRARIES = {"flax": "flax", "optax": "optax", "chex": "chex", "dm-haiku": "haiku",
             "tensorflow-probability": "tensorflow_probability"}  # fmt: skip
GOLDEN = Path(__file__).parent / "goldens" / "library_names.json"
# flax.nnx is younger than xmap; "python" is where TensorFlow Probability has its part for TensorFlow.
NOT_READ = SKIPPED | {"nnx", "python", "testing", "internal", "test_util"}


def modules(root: Path, library: str) -> dict[str, tuple[Path, ast.Module]]:
    found = {}
    for path in sorted((root / library).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        skipped = any(part.startswith("_") or part in NOT_READ or part.endswith("_test") for part in parts)
        if not skipped:
            found[".".join(parts)] = path, ast.parse(path.read_text())
    return found


def public_names(path: Path, tree: ast.Module, library: str) -> set[str]:
    """Returns the names that a module defines; for a package also the names that it imports from its own library."""
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] == library):
            is_package = path.name == "__init__.py"
            names |= {each.asname or each.name for each in node.names if is_package or each.asname == each.name}
    return {name for name in names if not name.startswith("_")}


def mentioned(tree: ast.Module) -> set[str]:
    """Returns all names in a module: imported, defined, used, or in a table of names."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names |= {each.asname or each.name for node in imports for each in node.names}
    return names | {str(node.value) for node in nodes if isinstance(node, ast.Constant)}


def lost_names(roots: list[Path], library: str) -> dict[str, set[str]]:
    newest = {name: mentioned(tree) for name, (_, tree) in modules(roots[-1], library).items()}
    submodules = {(name.rpartition(".")[0], name.rpartition(".")[2]) for name in newest}
    lost: dict[str, set[str]] = {}
    for root in roots[:-1]:
        for module, (path, tree) in modules(root, library).items():
            names = public_names(path, tree, library)
            gone = {name for name in names - newest.get(module, set()) if (module, name) not in submodules}
            gone |= set() if module in newest else {"*"}
            if gone:
                lost.setdefault(module, set()).update(gone)
    return lost


def main(folder: str) -> None:
    recorded = {}
    for distribution, library in LIBRARIES.items():
        roots = list(Path(folder).glob(f"{distribution}-[0-9]*"))
        roots.sort(key=lambda path: tuple(map(int, path.name.rpartition("-")[2].split("."))))
        versions = " ".join(root.name.rpartition("-")[2] for root in roots)
        names = {module: " ".join(sorted(gone)) for module, gone in sorted(lost_names(roots, library).items())}
        recorded[library] = {"versions": versions, "names": names}
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
