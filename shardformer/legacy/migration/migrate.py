"""`legacy --migrate PATH ...`: prints one patch that replaces removed names by today's, and lists what stays."""

import ast
import importlib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.files import read_text
from shardformer.legacy.check_source import removed_uses_of, source_files
from shardformer.legacy.migration import name_targets
from shardformer.legacy.migration.edits import Edit, apply_edits, span_of, unified_patch
from shardformer.legacy.migration.mesh_edits import MAPS, keep_blocks_filled, unparse_import
from shardformer.legacy.migration.name_edits import PJIT, NameEdits
from shardformer.legacy.migration.xmap_pass import rewrite_xmaps
from shardformer.legacy.removed_names import PROVIDERS
from shardformer.legacy.removed_uses import find_removed_uses, removed_name
from shardformer.legacy.source_names import dotted

MOST_ROUNDS = 50  # a round rewrites one level of nested calls


class Migration(NamedTuple):
    """A file before and after; `undecided` has a line with the reason for each place that stays."""

    source: str
    migrated: str
    decided: int
    undecided: list[str]
    helpers: set[str]  # the files that the result imports


def migrate(paths: Iterable[Path]) -> int:
    """Prints the patch of all files, for `patch -p1`, and on standard error what stays; 0 if nothing stays."""
    paths = list(paths)
    roots = {file: path for path in paths for file in (source_files(path, (".py",)) if path.is_dir() else [path])}
    decided, changed = 0, 0
    undecided: list[str] = []
    helpers: dict[Path, str] = {}  # the path that each gets, in order
    for file, root in roots.items():
        try:
            found = migrate_file(file)
        except (RecursionError, MemoryError):  # the parser's own limit is a MemoryError
            raise UsageError(f"{file}: it is nested too deeply to be read") from None
        sys.stdout.writelines(unified_patch(file, found.source, found.migrated))
        decided += found.decided
        changed += found.source != found.migrated
        undecided += found.undecided
        helpers |= {folder / f"{name}.py": name for folder in _importable(file, root) for name in sorted(found.helpers)}
    undecided += [line for path in dict.fromkeys(paths) if path.is_dir() for line in _notebooks_left(path)]
    for path, name in helpers.items():
        _print_helper(path, name_targets.HELPER_FILES[name].read_text())
    summary = f"{decided} xmaps rewritten, {changed} of {len(roots)} files changed, {len(undecided)} places left"
    print("\n  ".join([summary, *undecided]), file=sys.stderr)
    return 1 if undecided else 0


def _notebooks_left(folder: Path) -> list[str]:
    """Returns a line for each notebook of a folder that uses removed names."""
    uses = {file: removed_uses_of(file) for file in source_files(folder, (".ipynb",))}
    return [
        f"{file}: a notebook is not rewritten; `legacy --check` lists its uses of removed names: {len(found)}"
        for file, found in uses.items()
        if found
    ]


def _importable(file: Path, root: Path) -> list[Path]:
    """Returns the folders for a file's helpers: a file outside of a package may be run, or imported from the root."""
    if (file.parent / "__init__.py").exists() or not root.is_dir():
        return [file.parent]
    return [*dict.fromkeys((root, file.parent))]


def _print_helper(path: Path, text: str):
    before = read_text(path) if path.exists() else None
    if before is not None and before.partition("\n")[0] != text.partition("\n")[0]:
        raise UsageError(f"{path}: the patch would replace this file with a helper; rename it")
    sys.stdout.writelines(unified_patch(path, before or "", text, is_new=before is None))


def migrate_file(file: Path) -> Migration:
    """Rewrites a file as far as its own text decides."""
    try:
        source = read_text(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old code is full of "\d"
            ast.parse(source)
            return _migrate_source(file, source)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{file}: it is not Python 3: {error}") from None


def _migrate_source(file: Path, source: str) -> Migration:
    relative = (file.parent / "__init__.py").exists()
    first = rewrite_xmaps(file, source, f"{'.' if relative else ''}{name_targets.HELPERS}")
    try:
        migrated = rewrite_names(first.migrated, relative, kept=MAPS if first.stays else "")
    except SyntaxError as error:
        raise UsageError(f"{file}: its patch would not be Python ({error}); please report it") from None
    reasons = dict(first.stays)
    left = {use.name for use in find_removed_uses(migrated)}
    for use in find_removed_uses(source):
        if (use.name in left or _is_lost_in_a_copy(use.name)) and not (use.name.startswith(MAPS) and first.stays):
            reasons.setdefault(use.line, f"{use.name} has no mechanical answer; today: {use.advice}")
    lines = [f"{file}:{line}: {reason}" for line, reason in sorted(reasons.items())]
    return Migration(source, migrated, first.decided, lines, _imported_helpers(ast.parse(migrated)))


def _is_lost_in_a_copy(name: str) -> bool:
    """Returns True if a name was in a module whose copied file lacks it."""
    module, _, attribute = name.rpartition(".")
    is_copied = module in name_targets.WHOLE_MODULES
    return is_copied and not hasattr(importlib.import_module(PROVIDERS[module]), attribute)


def _imported_helpers(tree: ast.Module) -> set[str]:
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module is None):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules.append(node.module)
    return set(modules) & set(name_targets.HELPER_FILES)


def rewrite_names(source: str, relative: bool, kept: str = "") -> str:
    """Returns the source with today's names, keywords and members; raises SyntaxError if it is no Python.

    relative: the file imports its helpers with a dot. kept: a prefix of names that stay.
    """
    for copies in (False, True):  # the second pass copies names from the file that defines them
        for _ in range(MOST_ROUNDS):
            edits = NameEdits(source, ast.parse(source), relative, kept, copies).find()
            if not edits:
                break
            source = apply_edits(source, edits)
        unused = _unused_imports(ast.parse(source), kept)
        source = apply_edits(source, unused) if unused else source
    return source


def _unused_imports(tree: ast.Module, stays: str) -> list[Edit]:
    """Returns the removals of imports of removed names that nothing mentions any more."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    spelled = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    edits: dict[int, Edit] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and stays and stays in ast.unparse(node):
            continue
        if isinstance(node, ast.ImportFrom) and not node.level:
            kept = [each for each in node.names if not _is_removed(f"{node.module}.{each.name}")
                    or (each.asname or each.name) in names | texts]  # fmt: skip
        elif isinstance(node, ast.Import):
            kept = [each for each in node.names if not _is_removed(each.name) or
                    (each.asname in names if each.asname else each.name in spelled)]  # fmt: skip
        else:
            continue
        if len(kept) < len(node.names):
            keeps_top = isinstance(node, ast.Import) and any(not each.asname for each in node.names if each not in kept)
            kept = [*kept, ast.alias("jax")] if keeps_top and "jax" in names else kept
            edits[id(node)] = Edit(span_of(node), unparse_import(node, kept) if kept else "")
    keep_blocks_filled(tree, edits)
    return list(edits.values())


def _is_removed(name: str) -> bool:
    return name == PJIT or (removed_name(name) or "") == name
