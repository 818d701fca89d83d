"""Imports a stand-in where a script imports a package that is not installed and that one machine can do without."""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable
from pathlib import Path

from shardformer.legacy.after_import import complete_after_import
from shardformer.legacy.missing_packages import advice, is_missing, package_of
from shardformer.legacy.removed_imports import importing_file
from shardformer.legacy.stand_ins import buckets

FOLDER = Path(__file__).parent / "stand_ins"
# By imported name, the file that stands in for it. A bucket is a folder only where Google's client is missing.
FILES = {
    "google": "__init__.py",
    "google.cloud": "__init__.py",
    "google.cloud.exceptions": "google_storage.py",
    "google.cloud.storage": "google_storage.py",
    "ray": "ray.py",
    "smart_open": "smart_open.py",
    "transformers.generation_flax_logits_process": "old_generation.py",
    "transformers.generation_flax_utils": "old_generation.py",
    "wandb": "wandb.py",
}
_GOOGLE = "google.cloud.storage"
_FOLDERS_OF_LIBRARIES = {"site-packages", "dist-packages"}


def put_back(stack: contextlib.ExitStack) -> None:
    """Offers the stand-ins to imports, until `stack` closes."""
    folders = is_missing(_GOOGLE)
    if folders:
        complete_after_import("smart_open", functools.partial(_open_buckets_as_folders, stack), stack)
    complete_after_import("transformers.tokenization_utils_base", functools.partial(_put_sizes_back, stack), stack)
    needless = set() if folders else {name for name in FILES if name.startswith(("google", "smart_open"))}
    finder = _StandIns(FILES.keys() - needless)
    sys.meta_path.insert(0, finder)  # before Python's finder, which imports a folder without code too
    stack.callback(finder.remove)


def stands_in(package: str) -> bool:
    """Returns True if a program has imported a stand-in under this name."""
    return Path(getattr(sys.modules.get(package), "__file__", None) or "/").parent == FOLDER


@functools.cache
def _say(package: str) -> None:
    print(f"shardformer.legacy: {package} is not installed: {advice(package)}", file=sys.stderr)


def _open_buckets_as_folders(stack: contextlib.ExitStack, smart_open: types.ModuleType) -> None:
    _say("google.cloud")
    stack.callback(setattr, smart_open, "open", smart_open.open)
    smart_open.open = buckets.opener(smart_open.open)  # type: ignore[attr-defined]


def _put_sizes_back(stack: contextlib.ExitStack, tokenizers: types.ModuleType) -> None:
    """Adds a table that scripts write to, so that a tokenizer does not warn of long texts."""
    base = tokenizers.PreTrainedTokenizerBase
    if not hasattr(base, "max_model_input_sizes"):
        base.max_model_input_sizes = {}
        stack.callback(delattr, base, "max_model_input_sizes")


class _StandIns(importlib.abc.MetaPathFinder):
    """The finder of the stand-ins, for imports of missing packages by scripts.

    A library often imports such a package only to try. It finds no stand-in, unless a script has imported it before.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self._served = frozenset(names), []  # type: frozenset[str], list[str]

    def find_spec(self, fullname, path=None, target=None):
        importer = importing_file()
        if fullname not in self._names or importer is None or _FOLDERS_OF_LIBRARIES.intersection(Path(importer).parts):
            return None
        if not is_missing(fullname):
            return None
        is_package = FILES[fullname] == "__init__.py"
        if not is_package and not fullname.startswith("transformers."):  # whose modules have moved
            _say(package_of(fullname))
        self._served.append(fullname)
        locations = [] if is_package else None
        return importlib.util.spec_from_file_location(
            fullname, FOLDER / FILES[fullname], submodule_search_locations=locations
        )

    def remove(self) -> None:
        sys.meta_path.remove(self)
        for name in self._served:
            sys.modules.pop(name, None)
