"""Trees of flax 0.6, whose `init` returned FrozenDicts: since 0.7 it returns dicts, without `unfreeze`."""

import ast
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from shardformer.legacy.call_arguments import Resolver
from shardformer.legacy.source_names import ValueVisitor

VARIABLE = "FLAX_RETURN_FROZENDICT"
TODAY = f"flax.core.unfreeze(x); until then `legacy SCRIPT.py` sets {VARIABLE}=true"
ADVICE = f"flax: since 0.7 init returns dicts; set {VARIABLE}=true in the shell, or write flax.core.unfreeze(x)"
_PROJECT_FILES = (".git", "pyproject.toml", "requirements.txt", "setup.cfg", "setup.py")
_VERSION = re.compile(r"""(?m)^[\s'"-]*flax(?:\[\w+\])?\s*(==|~=|<=?)\s*0\.(\d+)""")
_MOST_FILES = 2_000  # read at a launch


def unfrozen_result(call: ast.Call, file: Resolver) -> ast.expr | None:
    """Returns x of `x.unfreeze()` where x is a result of `init`, or a part of one."""
    member = call.func
    if not isinstance(member, ast.Attribute) or member.attr != "unfreeze" or call.args or call.keywords:
        return None
    return member.value if _is_initialized(member.value, file) else None


def _is_initialized(node: ast.AST | None, file: Resolver) -> bool:
    if isinstance(node, ast.Name):
        value = file.assigned(node.id)
        return not isinstance(value, ast.Name) and _is_initialized(value, file)
    if isinstance(node, ast.Subscript):
        return _is_initialized(node.value, file)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Call):  # jax.jit(model.init)(...)
        return any(isinstance(each, ast.Attribute) and each.attr == "init" for each in node.func.args)
    return isinstance(node.func, ast.Attribute) and node.func.attr == "init"


def sign_of_old_flax(script: Path) -> str:
    """Returns what shows that the tree of a script was written for flax before 0.7; "" if nothing does."""
    home = _home(script.resolve())
    for path in sorted(home.glob("*")):
        if path.name.startswith(("requirements", "setup.", "pyproject", "environment")) and path.is_file():
            for operator, minor in _VERSION.findall(path.read_text(errors="replace")):
                if int(minor) < 7 or (operator == "<" and int(minor) == 7):
                    return f"{path.name} has flax{operator}0.{minor}"
    for path in itertools.islice(_python_files(home), _MOST_FILES):
        if line := _line_of_unfreeze(path):
            return f"{path.relative_to(home)}:{line} calls unfreeze"
    return ""


def _home(script: Path) -> Path:
    """Returns the folder of the script's project: one of the three above the script, or the script's own."""
    for folder in script.parents[:3]:
        if any((folder / name).exists() for name in _PROJECT_FILES):
            return folder
    return script.parent


def _python_files(home: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(home):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__", "site-packages")))
        yield from (path for name in sorted(files) if name.endswith(".py") and (path := Path(folder, name)).is_file())


def _line_of_unfreeze(path: Path) -> int:
    try:
        source = path.read_bytes()
        if b".unfreeze(" not in source:
            return 0
        finder = _Finder()
        finder.visit(ast.parse(source))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    return min(finder.lines, default=0)


class _Finder(ValueVisitor):
    def __init__(self):
        super().__init__()
        self.lines: list[int] = []

    def visit_Call(self, node: ast.Call):
        if unfrozen_result(node, self) is not None:
            self.lines.append(node.lineno)
        self.generic_visit(node)
