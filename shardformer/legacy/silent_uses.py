"""The places of a source file whose results changed without an error, found by reading it."""

import ast
from typing import NamedTuple

from shardformer.legacy import call_arguments
from shardformer.legacy.silent_changes import (
    ALWAYS,
    CALLS,
    CHECK_REP,
    COMPLEX_BOOL,
    FIRST_RELEASE,
    PARTITION_SPEC,
    PMAP_INDEX,
    PMAP_SHARD,
    RBG_VMAP,
    SHARD_MAP,
    SMALL_RANDINT,
    THREEFRY,
    THREEFRY_OPTION,
    TRACE,
    UNDER_DERIVATIVE,
    VIEW_NONE,
    Condition,
    SilentChange,
    differentiates_inside,
    sums_booleans_or_unsigned,
)
from shardformer.legacy.source_names import DERIVATIVES, ValueVisitor, calls_within, function_and_arguments

_SHARDS = {"addressable_data", "addressable_shards", "device_buffer", "device_buffers", "local_data", "local_shards"}
_TRANSFORMS = {f"haiku.{start}transform{end}" for start in ("", "multi_") for end in ("", "_with_state")}


class SilentUse(NamedTuple):
    line: int
    name: str
    change: SilentChange


class Findings(NamedTuple):
    """The silent changes of a file, the newest jax that its names need, and True if it sets the threefry option."""

    uses: list[SilentUse]
    needs: tuple[int, ...]
    sets_threefry: bool


def find_silent_changes(source: bytes | str) -> Findings:
    finder = _Finder()
    finder.visit(ast.parse(source))
    rbg = finder.rbg_uses if finder.has_rbg else []
    return Findings(sorted({*finder.uses, *rbg}), finder.needs, finder.sets_threefry)


def relevant_uses(findings: list[Findings]) -> list[list[SilentUse]]:
    """Returns the uses of each file of a tree that its code does not answer.

    A tree that uses a name of a later release was written with that release, or runs with it already.
    """
    needs = max((result.needs for result in findings), default=())
    has_option = any(result.sets_threefry for result in findings)
    return [
        [
            use
            for use in result.uses
            if not (use.change.library == "jax" and use.change.version <= needs)
            and not (use.change is THREEFRY and has_option)
        ]
        for result in findings
    ]


class _Finder(ValueVisitor):
    def __init__(self):
        super().__init__()
        self.uses: list[SilentUse] = []
        self.rbg_uses: list[SilentUse] = []
        self.needs: tuple[int, ...] = ()
        self.has_rbg = False
        self.sets_threefry = False

    def visit_Name(self, node: ast.Name):
        if isinstance(node.ctx, ast.Load):
            self._note_name(node)

    def visit_Attribute(self, node: ast.Attribute):
        self._note_name(node)
        if node.attr in _SHARDS and self.is_result_of("jax.pmap", node.value):
            self._add(node, f"x.{node.attr}", PMAP_SHARD)
        if node.attr == "init" and self._is_transformed(node.value):
            self._add(node, "haiku.transform(f).init", THREEFRY)
        if self.resolve(node) is None:
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript):
        is_number = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
        if is_number and self.is_result_of("jax.pmap", node.value):
            self._add(node, "x[i]", PMAP_INDEX)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare):
        sides = [node.left, *node.comparators]
        specs = [side for side in sides if isinstance(side, ast.Call) and self._is_spec(side)]
        if specs and any(isinstance(side, ast.Tuple) for side in sides):
            self._add(node, "PartitionSpec == tuple", PARTITION_SPEC)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant):
        self.sets_threefry |= node.value == THREEFRY_OPTION
        self.has_rbg |= node.value in ("rbg", "unsafe_rbg")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef):
        for decorator in node.decorator_list:
            names = set(map(self.resolve, function_and_arguments(decorator)))
            if DERIVATIVES & names:
                self._note_derivatives(node)
            if SHARD_MAP in names and isinstance(decorator, ast.Call) and differentiates_inside(decorator, node, self):
                self._add(decorator, SHARD_MAP, CHECK_REP)
        super().visit_FunctionDef(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call):
        function = self.resolve(node.func) or ""
        if function in DERIVATIVES and node.args:
            self._note_derivatives(node.args[0])
        self._note_call(self.uses, node, function, CALLS.get(function))
        if function == "jax.random.randint":
            self._note_call(self.uses, node, function, SMALL_RANDINT)
        if function == "jax.vmap":
            self._note_call(self.rbg_uses, node, function, RBG_VMAP)
        if not function and isinstance(node.func, ast.Attribute):
            self._note_member_call(node, node.func)
        self.generic_visit(node)

    def _note_derivatives(self, function: ast.AST):
        for call, name in calls_within(function, self):
            if name in UNDER_DERIVATIVE:
                self._add(call, name, UNDER_DERIVATIVE[name])

    def _note_member_call(self, call: ast.Call, member: ast.Attribute):
        first = call.args[0] if call.args else None
        if member.attr == "astype" and call_arguments.dtype_name(first) in {"bool", "bool_"}:
            if call_arguments.kind(member.value, self) == "complex":
                self._add(call, "x.astype(bool)", COMPLEX_BOOL)
        elif member.attr == "trace" and sums_booleans_or_unsigned(member.value, self):
            self._add(call, "x.trace()", TRACE)
        elif member.attr == "view" and isinstance(first, ast.Constant) and first.value is None:
            self._add(call, "x.view(None)", VIEW_NONE)

    def _note_call(
        self, uses: list[SilentUse], call: ast.Call, function: str, row: tuple[Condition, SilentChange] | None
    ):
        if row is not None and row[0](call, self):
            uses.append(SilentUse(call.lineno, function, row[1]))

    def _note_name(self, node: ast.Name | ast.Attribute):
        name = self.resolve(node)
        if name is None:
            return
        if name in ALWAYS:
            self._add(node, name, ALWAYS[name])
        parts = name.split(".")
        for end in range(2, len(parts) + 1):
            self.needs = max(self.needs, FIRST_RELEASE.get(".".join(parts[:end]), ()))

    def _is_transformed(self, node: ast.expr) -> bool:
        value = self.assigned(node.id) if isinstance(node, ast.Name) else node
        if isinstance(value, ast.Call) and self.resolve(value.func) == "haiku.without_apply_rng" and value.args:
            value = value.args[0]
        return isinstance(value, ast.Call) and self.resolve(value.func) in _TRANSFORMS

    def _is_spec(self, call: ast.Call) -> bool:
        return (self.resolve(call.func) or "").endswith((".PartitionSpec", "jax.P"))

    def _add(self, node: ast.expr, name: str, change: SilentChange):
        self.uses.append(SilentUse(node.lineno, name, change))
