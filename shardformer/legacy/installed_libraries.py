"""The names that the installed libraries define: `--check` looks up the names that are in none of its tables.

A module that is not imported yet is parsed, not imported: importing jax.experimental.jax2tf would import TensorFlow.
"""

import ast
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

DISTRIBUTIONS = {"haiku": "dm-haiku", "jax": "jax", "jaxlib": "jaxlib", "numpy": "numpy", "optax": "optax"}


@functools.cache
def missing(name: str) -> str | None:
    """Returns a dotted name up to the part that its library lacks; None if nothing is known to be missing."""
    library, *parts = name.split(".")
    if library not in DISTRIBUTIONS or not _is_module(library):
        return None
    home = library
    for number, part in enumerate(parts):
        defined = defines(home, part)
        if defined is False:
            return f"{home}.{part}"
        behind = _module_behind(home, part)
        if defined is None or behind is None or number == len(parts) - 1:
            return None  # only a run can tell which attributes an object has
        home = behind
    return None


def defines(module: str, name: str) -> bool | None:
    """Returns True if a module has a name; None if only importing the module could decide."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is still there, and will go
            return hasattr(loaded, name) or _is_module(f"{module}.{name}")
    if _is_module(f"{module}.{name}"):
        return True
    tree = _source(module)
    if tree is None:
        return None
    defined = set(_defined_names(tree))
    return True if name in defined else None if {"*", "__getattr__"} & defined else False


# Names that `install()` has put back: a library shows them, and lacks them.
put_back: set[str] = set()


def lives(name: str) -> bool:
    """Returns True if the installed library itself has a name of the tables of removed names."""
    home, _, attribute = name.rpartition(".")
    if name in put_back or home in put_back:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the name may be deprecated
        try:
            return hasattr(importlib.import_module(home), attribute)
        except ImportError:
            return False


def has(namespace: str, name: str) -> bool:
    """Returns True if an object of today's jax, but not a module, has this dotted name and the attribute."""
    home, _, attribute = namespace.rpartition(".")
    result = vars(sys.modules[home]).get(attribute) if home in sys.modules else None
    return not isinstance(result, types.ModuleType) and hasattr(result, name)


def lacks_flax_models() -> bool:
    """Returns True unless transformers 4 or older is installed."""
    try:
        return int(importlib.metadata.version("transformers").partition(".")[0]) > 4
    except importlib.metadata.PackageNotFoundError:
        return True


def has_jax() -> bool:
    return "jax" in sys.modules  # the package shardformer.legacy imports it


def has_option(name: str) -> bool:
    """Returns True if `jax.config` has an option, or jax is not installed to tell."""
    return not has_jax() or name in sys.modules["jax"].config.values


def version(name: str) -> str:
    """Returns the library of a dotted name and its version."""
    library = name.partition(".")[0]
    return f"{library} {importlib.metadata.version(DISTRIBUTIONS[library])}"


def _module_behind(home: str, part: str) -> str | None:
    """Returns the name of the module that `home.part` refers to, if it is one."""
    result = getattr(sys.modules.get(home), part, None)
    if isinstance(result, types.ModuleType):
        return result.__name__
    return f"{home}.{part}" if result is None and _is_module(f"{home}.{part}") else None


@functools.cache
def _is_module(name: str) -> bool:
    """Returns True if a module of this name exists, without importing anything."""
    if name in sys.modules:
        return True
    home = name.rpartition(".")[0]
    if not home:
        return importlib.util.find_spec(name) is not None
    paths = _search_paths(home)
    return paths is not None and _exists(name, paths)


def _exists(name: str, paths: list[str]) -> bool:
    try:
        return importlib.machinery.PathFinder.find_spec(name, paths) is not None
    except KeyError:  # a folder without __init__.py, in a package that is not imported
        return True


def _search_paths(package: str) -> list[str] | None:
    if package in sys.modules:
        return list(getattr(sys.modules[package], "__path__", [])) or None
    home = package.rpartition(".")[0]
    paths = _search_paths(home) if home else None
    if home and paths is None:
        return None
    try:
        spec = importlib.machinery.PathFinder.find_spec(package, paths)
    except KeyError:  # see _exists
        return [str(Path(path, package.rpartition(".")[2])) for path in paths or []]
    return list(spec.submodule_search_locations or []) or None if spec is not None else None


@functools.cache
def _source(module: str) -> ast.Module | None:
    home = module.rpartition(".")[0]
    try:
        spec = importlib.machinery.PathFinder.find_spec(module, _search_paths(home) if home else None)
    except KeyError:  # see _exists
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_bytes())


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a module's top level binds, also within its ifs and tries."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (imported.asname or imported.name.partition(".")[0] for imported in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            pending += ast.iter_child_nodes(node)
