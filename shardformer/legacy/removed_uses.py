"""The uses of removed names, options, keywords and members in a source file, found by reading it."""

import ast
from typing import NamedTuple

from shardformer.legacy import frozen_dicts, installed_libraries, pmap_uses
from shardformer.legacy.array_methods import LOST_METHODS, lost_method
from shardformer.legacy.lost_names import FLAX_MODELS, NOT_COVERED, advice_of_module, flax_model
from shardformer.legacy.removed_keywords import LOST_KEYWORDS, REMOVED_KEYWORDS
from shardformer.legacy.removed_members import CALLED_PROPERTIES, LOST_MEMBERS, REMOVED_MEMBERS
from shardformer.legacy.removed_names import MODULES, PROVIDERS, today
from shardformer.legacy.removed_options import REMOVED_OPTIONS
from shardformer.legacy.source_names import ValueVisitor, unevaluated_annotations

COVERED, NOT_PUT_BACK = "covered", "not covered"
# jax.config is a living object as well as a removed module: only an import of a name from it means the module.
CONFIG = "jax.config"
# Living names that can do less than they could, where they are the base of a class.
LESS_CAPABLE = {"optax.OptState"}


class RemovedUse(NamedTuple):
    line: int
    name: str
    status: str
    advice: str


def find_removed_uses(source: bytes | str) -> list[RemovedUse]:
    """In the order of their lines, through whatever alias a name was imported by."""
    finder = _Finder()
    tree = ast.parse(source)
    finder.plain_classes, finder.has_pmap = pmap_uses.plain_classes(tree), pmap_uses.mentions_pmap(tree)
    finder.unevaluated = unevaluated_annotations(tree)
    finder.visit(tree)
    return sorted({use for use in finder.uses if use.name not in finder.assigned_names})


class _Finder(ValueVisitor):
    def __init__(self):
        super().__init__()
        self.uses: list[RemovedUse] = []
        self.assigned_names: set[str] = set()  # those that the file itself gives to a library
        self.plain_classes: set[str] = set()
        self.has_pmap = False
        self.unevaluated: set[ast.AST] = set()

    def visit_Import(self, node: ast.Import):
        for imported in node.names:
            self._note_name(node, imported.name)

    def visit_ImportFrom(self, node: ast.ImportFrom):
        if node.level or node.module is None:
            return
        for imported in node.names:
            name = node.module if imported.name == "*" else f"{node.module}.{imported.name}"
            if name != CONFIG or imported.name == "*":
                self._note_name(node, name)

    def visit_Attribute(self, node: ast.Attribute):
        name = self._resolve(node)
        if name is not None and isinstance(node.ctx, ast.Store) and not name.startswith(f"{CONFIG}."):
            self.assigned_names.add(name)
        if name is None:
            if node.attr in REMOVED_MEMBERS:
                self._add(node, f"x.{node.attr}", COVERED, REMOVED_MEMBERS[node.attr])
            if node.attr in LOST_MEMBERS:
                self._add(node, f"x.{node.attr}", NOT_PUT_BACK, LOST_MEMBERS[node.attr])
            return self.generic_visit(node)
        top: ast.expr = node
        while isinstance(top, ast.Attribute):
            top = top.value
        if name.startswith("jax.Array.") and node.attr in LOST_METHODS:
            self._add(node, name, COVERED, LOST_METHODS[node.attr])
        removed = removed_name(name, living=CONFIG)
        if removed is not None and len(removed) > len(self._resolve(top) or ""):  # otherwise the import was the use
            self._add(node, removed, *_verdict(removed))
        return None

    def visit_Call(self, node: ast.Call):
        function = self._resolve(node.func)
        if function == f"{CONFIG}.update" and node.args and isinstance(node.args[0], ast.Constant):
            self._note_option(node, node.args[0].value)
        member = node.func.attr if isinstance(node.func, ast.Attribute) and function is None else ""
        if member in CALLED_PROPERTIES and not (node.args or node.keywords):
            self._add(node, f"x.{member}()", COVERED, CALLED_PROPERTIES[member])
        if (today := lost_method(node, self)) is not None:
            self._add(node, f"x.{member}", COVERED, f"{today}(x, ...)")
        if frozen_dicts.unfrozen_result(node, self) is not None:
            self._add(node, "init(...).unfreeze()", COVERED, frozen_dicts.TODAY)
        called = function or ""
        if called == "functools.partial" and node.args:
            called = self._resolve(node.args[0]) or ""
        for keyword in node.keywords:
            self._note_keyword(node, called, keyword.arg or "")
        if called == "jax.pmap" and pmap_uses.names_axis_by_enum(node, self.plain_classes):
            self._add(node, "jax.pmap(axis_name=Enum.member)", COVERED, pmap_uses.AXIS_TODAY)
        self._note_mixed_devices(node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef):
        self._note_mixed_devices(node)
        super().visit_FunctionDef(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef):
        for base in node.bases:
            if (name := self._resolve(base)) in LESS_CAPABLE:
                self._add(base, name, *_verdict(name))
        super().visit_ClassDef(node)

    def _note_mixed_devices(self, node: ast.Call | ast.FunctionDef | ast.AsyncFunctionDef):
        if pmap_uses.jit_of_mixed_devices(node, self, self.has_pmap) is not None:
            self._add(node, pmap_uses.MIXED, COVERED, pmap_uses.MIXED_TODAY)

    def _note_keyword(self, node: ast.Call, function: str, keyword: str):
        for table, status in ((REMOVED_KEYWORDS, COVERED), (LOST_KEYWORDS, NOT_PUT_BACK)):
            if keyword in table.get(function, {}):
                self._add(node, f"{function}({keyword}=)", status, table[function][keyword])

    def _resolve(self, node: ast.expr) -> str | None:
        """`from jax.config import config` and `jax.config.config` are the object jax.config."""
        name = self.resolve(node)
        if name is not None and (name + ".").startswith("jax.config.config."):
            return name.replace("jax.config.config", CONFIG, 1)
        return name

    def _note_name(self, node: ast.expr | ast.stmt, name: str):
        removed = removed_name(name)
        if removed is not None:
            self._add(node, removed, *_verdict(removed))

    def _note_option(self, node: ast.Call, option: object):
        if not isinstance(option, str) or installed_libraries.has_option(option):
            return
        if option in REMOVED_OPTIONS:
            self._add(node, f'{CONFIG}.update("{option}")', COVERED, "delete it: the option means nothing any more")
        else:
            self._add(node, f'{CONFIG}.update("{option}")', NOT_PUT_BACK, "not an option of this jax")

    def _add(self, node: ast.expr | ast.stmt, name: str, status: str, advice: str):
        if status == NOT_PUT_BACK and node in self.unevaluated:
            return  # such a name is often one that no version had
        self.uses.append(RemovedUse(node.lineno, name, status, advice))


def removed_name(name: str, living: str = "") -> str | None:
    """The longest removed name that `name` starts with; one part more where that is a module that came back."""
    if (model := flax_model(name)) is not None:
        return model if installed_libraries.lacks_flax_models() else None
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        start, rest = ".".join(parts[:end]), parts[end:]
        provider = PROVIDERS.get(start, ":")
        if (
            rest and ":" not in provider and not installed_libraries.lives(start)
        ):  # a module under another name, or one of ours
            if provider.startswith("shardformer."):
                is_lost = installed_libraries.defines(provider, rest[0]) is False
                return ".".join(parts[: end + 1]) if is_lost else start
            return removed_name(".".join([provider, *rest])) or start
        if start in PROVIDERS and installed_libraries.lives(start):
            return None
        if start in PROVIDERS or (start in NOT_COVERED and not (rest and installed_libraries.has(start, rest[0]))):
            return start
        if end == 3 and parts[:2] == ["jax", "config"] and parts[2] in REMOVED_OPTIONS:
            return start
        if start in MODULES and start != living:
            return ".".join(parts[: end + 1])
    return installed_libraries.missing(name)


def _verdict(name: str) -> tuple[str, str]:
    if name in PROVIDERS:
        return COVERED, today(name)
    if name in MODULES:
        return COVERED, "see the names that it is used for"
    if flax_model(name) is not None:
        return NOT_PUT_BACK, FLAX_MODELS
    if name in NOT_COVERED:
        return NOT_PUT_BACK, today(name)
    home, _, attribute = name.rpartition(".")
    if home == CONFIG and attribute in REMOVED_OPTIONS:
        return COVERED, "delete it: the option means nothing any more"
    if home in MODULES or PROVIDERS.get(home, "").startswith("shardformer."):
        return NOT_PUT_BACK, f"{home} comes back without it" + (f": {today(home)}" if home in PROVIDERS else "")
    advice = advice_of_module(name)
    return NOT_PUT_BACK, f"not in {installed_libraries.version(name)}" + (f": {advice}" if advice else "")
