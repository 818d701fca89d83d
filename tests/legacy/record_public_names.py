"""Writes goldens/public_names.json: `python tests/legacy/record_public_names.py FOLDER`.

FOLDER has one folder for each release, jax-VERSION, as `pip install --no-deps --target` makes it. The sources are read
and not imported, because no package index has the jaxlib of releases before 0.4.13. A module's public names are those
that it binds without an underscore, from jax: its own definitions, and what it imports where it only imports.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"tests", "test", "jax2tf", "mosaic", "pallas", "examples", "build", "serialization", "version"}
GOLDEN = Path(__file__).parent / "goldens" / "public_names.json"


class Release:
    """The sources of one release."""

    def __init__(self, root: Path):
        self.root = root
        self._names: dict[str, set[str]] = {}

    def modules(self) -> Iterator[tuple[str, Path]]:
        for path in sorted((self.root / "jax").rglob("*.py")):
            parts = list(path.relative_to(self.root).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") or part in SKIPPED for part in parts):
                yield ".".join(parts), path

    def public_names(self, module: str, path: Path) -> set[str]:
        if module not in self._names:
            self._names[module] = set()  # for modules that import each other
            try:
                tree = ast.parse(path.read_text())
            except SyntaxError:
                return set()
            statements = list(_statements(tree.body))
            defines = any(
                isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" for node in statements
            )
            defines = defines and path.name != "__init__.py"
            found = {name for node in statements for name in self._bound(node, module, path, defines)}
            self._names[module] = {name for name in found if not name.startswith("_")}
        return self._names[module]

    def _bound(self, node: ast.stmt, module: str, path: Path, defines: bool) -> set[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return {node.name}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_deprecations":
            return set(_deprecated(node.value))
        if isinstance(node, ast.Assign):
            targets = [inner for target in node.targets for inner in ast.walk(target)]
            return {inner.id for inner in targets if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            return {node.target.id}
        if isinstance(node, ast.ImportFrom):
            return self._imported(node, module, path, defines)
        return set()

    def _imported(self, node: ast.ImportFrom, module: str, path: Path, defines: bool) -> set[str]:
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        home = ".".join([*parents, *([node.module] if node.module else [])])
        if home.partition(".")[0] != "jax":
            return set()
        found = set()
        for each in node.names:
            if each.name == "*":
                source = self._path(home)
                found |= self.public_names(home, source) if source is not None else set()
            elif not (defines and each.asname != each.name) and (
                home == module or self._path(f"{home}.{each.name}") is None
            ):
                found.add(each.asname or each.name)
        return found

    def _path(self, module: str) -> Path | None:
        folder = self.root.joinpath(*module.split("."))
        paths = (folder / "__init__.py", folder.with_suffix(".py"))
        return next((path for path in paths if path.exists()), None)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, also within its ifs and tries."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handled = [statement for handler in node.handlers for statement in handler.body]
            yield from _statements([*node.body, *node.orelse, *handled])
        elif not isinstance(node, ast.If):
            yield node


def _deprecated(table: ast.expr) -> Iterator[str]:
    """Yields the names of a module's `_deprecations` that it still had."""
    if isinstance(table, ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            gone = isinstance(value, ast.Tuple) and isinstance(value.elts[1], ast.Constant)
            if isinstance(key, ast.Constant) and not gone:
                yield str(key.value)


def main(folder: str) -> None:
    public: dict[str, set[str]] = {}
    versions = []
    for root in sorted(Path(folder).glob("jax-*"), key=lambda path: tuple(map(int, path.name[4:].split(".")))):
        versions.append(root.name[4:])
        release = Release(root)
        for module, path in release.modules():
            public.setdefault(module, set()).update(release.public_names(module, path))
    names = [f"{json.dumps(module)}: {json.dumps(' '.join(sorted(public[module])))}" for module in sorted(public)]
    GOLDEN.write_text(f'{{"versions": "{" ".join(versions)}",\n"names": {{\n' + ",\n".join(names) + "\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
