"""`legacy --migrate PATH ...`: prints one patch that replaces removed names by today's, and lists what stays."""

import ast
import importlib
import itertools
import re
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.files import read_text
from shardformer.legacy import installed_libraries
from shardformer.legacy.check_source import removed_uses_of, source_files
from shardformer.legacy.migration import name_targets
from shardformer.legacy.migration.edits import Edit, apply_edits, span_of, unified_patch
from shardformer.legacy.migration.mesh_edits import MAPS, keep_blocks_filled, unparse_import
from shardformer.legacy.migration.name_edits import PJIT, NameEdits, lines_of_pjit
from shardformer.legacy.migration.xmap_pass import rewrite_xmaps
from shardformer.legacy.removed_names import PROVIDERS
from shardformer.legacy.removed_uses import find_removed_uses, removed_name
from shardformer.legacy.source_names import dotted
from shardformer.tables import escape, escape_controls, format_count

# Parts of names that still exist, and are rewritten.
LIVING_WORDS = ("Mesh", "ad.linearize", "backend", "mesh:", "pjit", "thread_resources", "xmap")
SECONDS_TO_PROGRESS = 5  # between lines on standard error
MOST_ROUNDS = 50  # a round rewrites one level of nested calls
_IMPORT = re.compile(r"(?m)^[ \t]*(?:from[ \t]+(\w[\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|[^\n#;]*)")
PROBABILITY = ("tensorflow_probability.substrates.jax", "distrax")  # distrax imports it
PROBABILITY_NEEDS = "jax.interpreters.xla.pytype_aval_mappings"
PROBABILITY_STAYS = f"TensorFlow Probability 0.25, the last release, needs {PROBABILITY_NEEDS}: run it under `legacy`"
PJIT_STAYS = "pjit stays where it is a value, or called with * or **; today: jax.jit with in_shardings, out_shardings"


class NotReadError(Exception):
    """A file that cannot be read, or is not Python 3."""


class Migration(NamedTuple):
    """A file before and after; `undecided` has a line with the reason for each place that stays."""

    source: str
    migrated: str
    decided: int
    undecided: list[str]
    helpers: set[str]  # the files that the result imports


def migrate(paths: Iterable[Path], seconds_to_progress: float = SECONDS_TO_PROGRESS) -> int:
    """Prints the patch of all files, for `patch -p1`, and on standard error what stays.

    Returns 0 if nothing stays; 1 if a name stays or a file cannot be read, as `--check` does.
    """
    paths = list(paths)
    roots = {file: path for path in paths for file in _python_files(path)}
    decided, changed = 0, 0
    undecided: list[str] = []
    users: dict[Path, Migration] = {}  # the files that import helpers
    imported: set[str] = set()  # modules, and names in modules, that a file of the trees imports
    printed_at = time.monotonic()
    for number, (file, root) in enumerate(roots.items()):
        if time.monotonic() > printed_at + seconds_to_progress:
            printed_at = time.monotonic()
            print(f"{number} of {len(roots)} files read, next {file}", file=sys.stderr)
        try:
            result = migrate_file(file, root)
        except NotReadError as error:
            undecided.append(f"{file}: not read: {error}")
            continue
        _print_patch(unified_patch(file, result.source, result.migrated))
        decided += result.decided
        changed += result.source != result.migrated
        undecided += result.undecided
        imported |= _imported_names(result.source)
        if result.helpers:
            users[file] = result
    undecided += [line for path in dict.fromkeys(paths) for line in _notebooks_left(path)]
    helpers = {
        folder / f"{name}.py": name
        for file, result in users.items()
        for folder in _importable(file, roots[file], result.source, imported)
        for name in sorted(result.helpers)
    }
    for path, name in helpers.items():
        _print_helper(path, name_targets.HELPER_FILES[name].read_text())
    summary = (
        f"{format_count(decided, 'xmap')} rewritten, {changed} of {format_count(len(roots), 'file')} changed, "
        f"{format_count(len(undecided), 'place')} left"
    )
    print("\n  ".join([summary, *map(escape, undecided)]), file=sys.stderr)
    return 1 if undecided else 0


def _print_patch(lines: Iterable[str]) -> None:
    """Prints a patch; a terminal would obey control characters in the names of files and in their lines."""
    sys.stdout.writelines(map(escape_controls, lines) if sys.stdout.isatty() else lines)


def _python_files(path: Path) -> list[Path]:
    if path.is_dir():
        return list(source_files(path, (".py",)))
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    return [] if path.suffix == ".ipynb" else [path]


def _notebooks_left(path: Path) -> list[str]:
    """Returns a line for each notebook that uses removed names: of a folder, or the path itself."""
    files = source_files(path, (".ipynb",)) if path.is_dir() else [path]
    uses = {file: removed_uses_of(file) for file in files if file.suffix == ".ipynb"}
    return [
        f"{file}: a notebook is not rewritten; `legacy --check` lists its uses of removed names: {len(result)}"
        for file, result in uses.items()
        if result
    ]


def _importable(file: Path, root: Path, source: str, imported: set[str]) -> list[Path]:
    """Returns the folders for a file's helpers: a file outside of a package may be run, or imported from the root.

    imported: what the files of the tree import. Only the root needs helpers if one of its modules needs the root.
    """
    packages = _packages(file, root)
    if packages or not root.is_dir():
        return [packages[-1] if packages else file.parent]
    tops = {name.partition(".")[0] for name in _imported_names(source)}
    uses_root = any(_is_importable(root, top) and not _is_importable(file.parent, top) for top in tops)
    is_imported = ".".join(file.relative_to(root).with_suffix("").parts) in imported
    only_root = uses_root or (is_imported and not _is_script(source))
    return [root] if only_root else [*dict.fromkeys((root, file.parent))]


def _is_script(source: str) -> bool:
    """Returns True if a module does more than define names."""
    is_work = [
        isinstance(node, ast.For | ast.While | ast.With)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        for node in ast.parse(source).body
    ]
    return "__main__" in source or any(is_work)


def _is_importable(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").exists()


def _imported_names(source: str) -> set[str]:
    """Returns the modules that a source imports, and the names that it imports from them."""
    names: set[str] = set()
    for module, imported in _IMPORT.findall(source):
        parts = [part.split() for part in imported.strip("()").split(",")]
        names |= {".".join([*([module] if module else []), part[0]]) for part in parts if part}
        names |= {module} - {""}
    return names


def _packages(file: Path, root: Path) -> list[Path]:
    """Returns the packages around a file up to `root`, the innermost first; helpers are in the last one."""
    every = itertools.takewhile(lambda folder: (folder / "__init__.py").exists(), file.parents)
    return [folder for folder in every if folder == file.parent or folder.is_relative_to(root)]


def _print_helper(path: Path, text: str):
    before = read_text(path) if path.exists() else None
    if before is not None and before.partition("\n")[0] != text.partition("\n")[0]:
        raise UsageError(f"{path}: the patch would replace this file with a helper; rename it")
    _print_patch(unified_patch(path, before or "", text, is_new=before is None))


def migrate_file(file: Path, root: Path | None = None) -> Migration:
    """Rewrites a file as far as its text decides; raises NotReadError.

    root: the folder that is migrated; the outermost package in it gets the helpers.
    """
    try:
        source = read_text(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old code is full of "\d"
            ast.parse(source)
            return _migrate_source(file, source, "." * len(_packages(file, root or file)))
    except (OSError, UnicodeDecodeError) as error:
        raise NotReadError(f"{getattr(error, 'strerror', None) or error}") from None
    except (SyntaxError, ValueError) as error:
        raise NotReadError(f"not Python 3: {error}") from None
    except (RecursionError, MemoryError):  # the parser's limit is a MemoryError
        raise NotReadError("it is nested too deeply") from None


def _migrate_source(file: Path, source: str, dots: str) -> Migration:
    """Rewrites a source; `dots`: what its imports of helpers start with."""
    uses, probability = find_removed_uses(source), _lines_of_probability(source)
    if not uses and not probability and not any(word in source for word in LIVING_WORDS):
        return Migration(source, source, 0, [], set())
    first = rewrite_xmaps(file, source, f"{dots}{name_targets.HELPERS}")
    try:
        migrated = rewrite_names(first.migrated, dots, kept=MAPS if first.stays else "")
    except SyntaxError as error:
        raise NotReadError(f"its patch would not be Python ({error}); please report it") from None
    reasons = dict(first.stays) | dict.fromkeys(lines_of_pjit(source), PJIT_STAYS)
    reasons |= dict.fromkeys(probability, PROBABILITY_STAYS)
    left = {use.name for use in find_removed_uses(migrated)}
    for use in uses:
        stays = not left.isdisjoint((use.name, _moved(use.name))) or _is_lost_in_a_copy(use.name)
        if stays and not (use.name.startswith(MAPS) and first.stays):
            reasons.setdefault(use.line, f"{use.name} has no mechanical answer; today: {use.advice}")
    lines = [f"{file}:{line}: {reason}" for line, reason in sorted(reasons.items())]
    return Migration(source, migrated, first.decided, lines, _imported_helpers(ast.parse(migrated)))


def _lines_of_probability(source: str) -> list[int]:
    """Returns the lines that import TensorFlow Probability for jax, if the installed jax lacks what it needs."""
    mentions = any(name.partition(".")[0] in source for name in PROBABILITY)
    if not mentions or installed_libraries.lives(PROBABILITY_NEEDS):
        return []
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [node.lineno for node in imports if any(map(_is_probability, _names(node)))]


def _is_probability(name: str) -> bool:
    return any((name + ".").startswith(f"{home}.") for home in PROBABILITY)


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Returns the dotted names that an import mentions."""
    home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [f"{home}{each.name}" for each in node.names]


def _moved(name: str) -> str:
    """Returns a name under the module that its own module is rewritten to, which may lack it too."""
    module, _, attribute = name.rpartition(".")
    return f"{name_targets.MOVED.get(module, module)}.{attribute}"


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


def rewrite_names(source: str, dots: str, kept: str = "") -> str:
    """Returns the source with today's names, keywords and members; raises SyntaxError if it is no Python.

    dots: what imports of helpers start with. kept: a prefix of names that stay.
    """
    for copies in (False, True):  # the second pass copies names from the file that defines them
        for _ in range(MOST_ROUNDS):
            edits = NameEdits(source, ast.parse(source), dots, kept, copies).find()
            if not edits:
                break
            source = apply_edits(source, edits)
        unused = _unused_imports(ast.parse(source), kept)
        source = apply_edits(source, unused) if unused else source
    return source


def _unused_imports(tree: ast.Module, stays: str) -> list[Edit]:
    """Returns the removals of imports of removed names that nothing mentions any more."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    spelled = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    edits: dict[int, Edit] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and stays and stays in ast.unparse(node):
            continue
        if isinstance(node, ast.ImportFrom) and not node.level:
            remaining = [each for each in node.names if not _is_removed(f"{node.module}.{each.name}")
                    or (each.asname or each.name) in names | strings]  # fmt: skip
        elif isinstance(node, ast.Import):
            remaining = [each for each in node.names if not _is_removed(each.name) or
                    (each.asname in names if each.asname else each.name in spelled)]  # fmt: skip
        else:
            continue
        if len(remaining) < len(node.names):
            keeps_top = isinstance(node, ast.Import) and any(
                not each.asname for each in node.names if each not in remaining
            )
            remaining = [*remaining, ast.alias("jax")] if keeps_top and "jax" in names else remaining
            edits[id(node)] = Edit(span_of(node), unparse_import(node, remaining) if remaining else "")
    keep_blocks_filled(tree, edits)
    return list(edits.values())


def _is_removed(name: str) -> bool:
    return name == PJIT or (removed_name(name) or "") == name
