"""The edits that replace removed names, keywords, members and options by today's: one round over a source file."""

import ast
from typing import NamedTuple

from shardformer.legacy import installed_libraries, pmap_uses
from shardformer.legacy.lost_names import NOT_COVERED
from shardformer.legacy.migration import call_rewrites, name_targets
from shardformer.legacy.migration.edits import Edit, Span, span_of, split_lines, text_of
from shardformer.legacy.migration.mesh_edits import keep_blocks_filled, unparse_import
from shardformer.legacy.removed_keywords import BY_POSITION, LOST_KEYWORDS, REMOVED_KEYWORDS
from shardformer.legacy.removed_names import PROVIDERS
from shardformer.legacy.removed_options import REMOVED_OPTIONS
from shardformer.legacy.source_names import COMPREHENSIONS, ValueVisitor

PJIT, INDEX, LINEARIZE = "jax.experimental.pjit.pjit", "jax.ops.index", "jax.interpreters.ad.linearize"
SETUP_TPU = "jax.tools.colab_tpu.setup_tpu"
AT_EACH_USE = {PJIT, INDEX}  # rewritten where it is used, not where it is imported


class Spelling(NamedTuple):
    """The text of a dotted name in a file, and the imports that it needs."""

    text: str
    imports: tuple[str, ...]


class NameEdits(ValueVisitor):
    """Finds the edits of one round; rewritten calls may hold more, which the next round finds.

    dots: what imports of helpers start with, in a package. kept: a prefix of names that stay.
    copies: use copies of whole modules, for all that nothing else has replaced.
    """

    def __init__(self, source: str, tree: ast.Module, dots: str = "", kept: str = "", copies: bool = False):
        super().__init__()
        self.tree, self.kept, self.copies = tree, kept, copies
        self._lines = split_lines(source)
        self._has_pmap = pmap_uses.mentions_pmap(tree)
        self.dots = dots
        self._names_of_buffers: set[str] = set()
        self.edits: list[Edit] = []
        self._removals: dict[int, Edit] = {}

    def find(self) -> list[Edit]:
        self.visit(self.tree)
        keep_blocks_filled(self.tree, self._removals)
        return [*self.edits, *self._removals.values()]

    def _is_gone(self, name: str) -> bool:
        """Returns True if a name of the tables is to be replaced; pjit and linearize also while jax has them."""
        if self.kept and name.startswith(self.kept):
            return False
        return name in (PJIT, LINEARIZE) or not installed_libraries.lives(name)

    # What call_rewrites.py asks for ----------------------------------------------------------------------------------

    @property
    def helpers(self) -> str:
        """The module of the helpers, as an import of the file names it."""
        return f"{self.dots}{name_targets.HELPERS}"

    def text(self, node: ast.expr) -> str:
        return text_of(self._lines, span_of(node))

    def is_buffer(self, node: ast.expr) -> bool:
        """Returns True for the part of an array on one device: `x.device_buffer`, and each of `x.device_buffers`."""
        if isinstance(node, ast.Name):
            return node.id in self._names_of_buffers
        if isinstance(node, ast.Subscript):
            return _are_buffers(node.value)
        return isinstance(node, ast.Attribute) and node.attr == "device_buffer"

    def spell(self, dotted: str) -> Spelling:
        """Spells a dotted name by the longest alias that the file has, or by its module."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            prefix = ".".join(parts[:end])
            local = self._local_name(prefix)
            if local is not None:
                needed = self._needed_import(dotted) if end == 1 else ()
                return Spelling(".".join([local, *parts[end:]]), needed)
        if parts[0] == "builtins" and not any(parts[1] in scope for scope in self._scopes):
            return Spelling(parts[1], ())
        return Spelling(dotted, self._needed_import(dotted) or (f"import {parts[0]}",))

    def _needed_import(self, dotted: str) -> tuple[str, ...]:
        home = dotted.rpartition(".")[0]
        return (f"import {home}",) if home.startswith(name_targets.LOADED_BY_NAME) else ()

    def _local_name(self, dotted: str) -> str | None:
        for scope in reversed(self._scopes):
            for local, value in scope.items():
                if value == dotted and self.imported(local) == dotted and local != "*":
                    return local
        return None

    def _visit_comprehension(self, node: COMPREHENSIONS):
        buffers: set[str] = set()
        others: set[str] = set()
        for each in node.generators:
            names = {target.id for target in ast.walk(each.target) if isinstance(target, ast.Name)}
            (buffers if isinstance(each.target, ast.Name) and _are_buffers(each.iter) else others).update(names)
        outer = self._names_of_buffers
        self._names_of_buffers = (outer | buffers) - others
        super()._visit_comprehension(node)
        self._names_of_buffers = outer

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_Lambda(self, node: ast.Lambda):
        outer = self._names_of_buffers
        self._names_of_buffers = outer - {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        super().visit_Lambda(node)
        self._names_of_buffers = outer

    # Statements ------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import):
        names = [
            ast.alias(name_targets.MOVED[each.name], each.asname)
            if each.name in name_targets.MOVED and each.asname and self._is_gone(each.name)
            else ast.alias("jax")
            if each.name in ("jax.config", "jax.tools.colab_tpu") and not each.asname
            else each
            for each in node.names
        ]
        copied = {each.name: self._copy_import(each.name, each.asname) for each in names if each.asname}
        lines = [line for line in copied.values() if line is not None]
        names = [each for each in names if copied.get(each.name) is None]
        if lines or [each.name for each in names] != [each.name for each in node.names]:
            self._replace_import(node, names, lines)

    def visit_ImportFrom(self, node: ast.ImportFrom):
        if node.level or node.module is None:
            return
        remaining, lines = [], []
        for each in node.names:
            line = self._moved_import(f"{node.module}.{each.name}", each.asname or each.name)
            if line is None:
                remaining.append(each)
            else:
                lines.append(line)
        if lines:
            self._replace_import(node, remaining, lines)

    def _replace_import(self, node: ast.Import | ast.ImportFrom, remaining: list[ast.alias], lines: list[str]):
        indent = " " * node.col_offset
        first = [unparse_import(node, remaining)] if remaining else []
        self.edits.append(Edit(span_of(node), f"\n{indent}".join([*first, *lines])))

    def _copy_import(self, name: str, local: str = "") -> str | None:
        """Returns the import of a name, or of a module, from a helper file; None if no helper has it."""
        module, _, attribute = name.rpartition(".")
        if name in name_targets.IN_HELPERS:
            home, today = name_targets.IN_HELPERS[name]
        elif (
            local and module in name_targets.WHOLE_MODULES and installed_libraries.defines(PROVIDERS[module], attribute)
        ):
            home, today = name_targets.IN_HELPERS[module][0], attribute
        else:
            return None
        if not self._is_gone(name) or not (self.copies or home == name_targets.HELPERS):
            return None
        source = (
            f"from {self.dots}{home} import {today}"
            if today
            else f"from {self.dots} import {home}"
            if self.dots
            else f"import {home}"
        )
        return source + (f" as {local}" if local not in ("", today or home) else "")

    def _moved_import(self, name: str, local: str) -> str | None:
        if (line := self._copy_import(name, local)) is not None:
            return line
        if name in name_targets.MOVED and name not in AT_EACH_USE and self._is_gone(name):
            home, _, today = name_targets.MOVED[name].rpartition(".")
        else:
            return None
        return f"from {home} import {today}" + (f" as {local}" if local != today else "")

    def visit_Expr(self, node: ast.Expr):
        call = node.value
        if not isinstance(call, ast.Call):
            return self.generic_visit(node)
        function = self._without_config_twice(call.func)
        option = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        removed = option in REMOVED_OPTIONS and not installed_libraries.has_option(str(option))
        if (function == "jax.config.update" and removed) or function in ("jax.config.enable_omnistaging", SETUP_TPU):
            self._removals[id(node)] = Edit(span_of(node), "")
            return None
        rewritten = call_rewrites.rewrite_statement(self, function or "", call)
        if rewritten is not None:
            self._replace_call(call, rewritten)
            return None
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef):
        for decorator in node.decorator_list:
            if self.resolve(decorator) == PJIT:  # without arguments: jax.jit
                spelled = self.spell("jax.jit")
                self.edits.append(Edit(span_of(decorator), spelled.text, spelled.imports))
        self._edit_jit_of_mixed_devices(node)
        super().visit_FunctionDef(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef):
        for base in node.bases:
            if self.resolve(base) == "optax.OptState":
                spelled = self.spell("typing.NamedTuple")
                self.edits.append(Edit(span_of(base), spelled.text, spelled.imports))
        super().visit_ClassDef(node)

    # Expressions -----------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call):
        function = self._without_config_twice(node.func) or ""
        rewritten = call_rewrites.rewrite_call(self, function, node)
        if rewritten is not None:
            return self._replace_call(node, rewritten)
        is_partial = function == "functools.partial" and bool(node.args)
        called = (self.resolve(node.args[0]) or "") if is_partial else function
        for keyword in node.keywords:
            self._edit_keyword(node, called, keyword)
        self._edit_jit_of_mixed_devices(node)
        return self.generic_visit(node)

    def _edit_jit_of_mixed_devices(self, node: ast.Call | ast.FunctionDef | ast.AsyncFunctionDef):
        jit = pmap_uses.jit_of_mixed_devices(node, self, self._has_pmap)
        edit = jit and Edit(span_of(jit), "jit_on_one_device", (f"from {self.helpers} import jit_on_one_device",))
        if edit and edit not in self.edits:  # for another call
            self.edits.append(edit)

    def _replace_call(self, node: ast.Call, rewritten: "call_rewrites.Rewritten"):
        self.edits.append(Edit(span_of(node), rewritten.text, rewritten.imports))

    def _edit_keyword(self, node: ast.Call, function: str, keyword: ast.keyword):
        name = keyword.arg or ""
        today = (REMOVED_KEYWORDS.get(function, {}) | LOST_KEYWORDS.get(function, {})).get(name)
        if today is None:
            return
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if today.isidentifier() and today != "nothing" and not (name == "concrete" or function == PJIT):
            end = keyword.col_offset + len(name)
            self.edits.append(Edit(Span(keyword.lineno, keyword.col_offset, keyword.lineno, end), today))
        elif name == "sym_pos" and value is True:
            self.edits.append(Edit(_keyword_span(keyword), 'assume_a="pos"'))
        elif name == "vectorized" and isinstance(value, bool):
            method = "expand_dims" if value else "sequential"
            self.edits.append(Edit(_keyword_span(keyword), f'vmap_method="{method}"'))
        elif today == BY_POSITION and _is_in_position(node, name, list(REMOVED_KEYWORDS[function])):
            value_start = span_of(keyword.value)
            span = Span(keyword.lineno, keyword.col_offset, value_start.first_line, value_start.first_column)
            self.edits.append(Edit(span, ""))
        elif today == "nothing" or (name in ("sym_pos", "concrete") and value is False):
            self.edits.append(Edit(_span_with_comma(node, keyword), ""))

    def visit_Attribute(self, node: ast.Attribute):
        name = self._without_config_twice(node)
        if name is None:
            self._edit_member(node)
            return self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return None
        parts = name.split(".")
        prefix: ast.expr = node
        for end in range(len(parts), 0, -1):
            base = self.resolve(prefix)
            if base is None or isinstance(prefix, ast.Name) or ".".join(parts[:end]) in NOT_COVERED:
                break  # listed: a new name of its module would not have it either
            if self._edit_name(prefix, ".".join(parts[:end])):
                break
            prefix = prefix.value if isinstance(prefix, ast.Attribute) else prefix
        return None

    def _edit_name(self, node: ast.expr, name: str) -> bool:
        """Replaces a removed name; returns False if it has no mechanical answer."""
        if (line := self._copy_import(name)) is not None:
            local = line.rpartition(" ")[2]
            if any(scope.get(local, "") is None for scope in self._scopes):  # the file defines the name itself
                local = f"legacy_{local}"
                line += f" as {local}"
            self.edits.append(Edit(span_of(node), local, (line,)))
        elif name in name_targets.VALUES and self._is_gone(name):
            self.edits.append(self._value_edit(node, *name_targets.VALUES[name]))
        elif name in name_targets.MOVED and name != PJIT and self._is_gone(name):
            today = name_targets.MOVED[name]
            spelled = self.spell(name_targets.AS_ATTRIBUTE.get(today, today))
            self.edits.append(Edit(span_of(node), spelled.text, spelled.imports))
        else:
            return False
        return True

    def visit_Name(self, node: ast.Name):
        name = self.imported(node.id)
        if name in name_targets.VALUES and self._is_gone(name):
            self.edits.append(self._value_edit(node, *name_targets.VALUES[name]))
        elif name == INDEX:
            self._edit_name(node, name)

    def _value_edit(self, node: ast.expr, start: str, dotted: str) -> Edit:
        spelled = self.spell(dotted) if dotted else Spelling("", ())
        return Edit(span_of(node), f"({start}{spelled.text})", spelled.imports)

    def _edit_member(self, node: ast.Attribute):
        if node.attr in name_targets.MEMBERS:
            span = span_of(node)
            start = span.last_column - len(node.attr)
            self.edits.append(Edit(span._replace(first_line=span.last_line, first_column=start),
                                   name_targets.MEMBERS[node.attr]))  # fmt: skip
        elif node.attr == "device_buffers":
            text = f"[shard.data for shard in {self.text(node.value)}.addressable_shards]"
            self.edits.append(Edit(span_of(node), text))
        elif node.attr == "map_primitive":
            self.edits.append(Edit(span_of(node), "False"))

    def _without_config_twice(self, node: ast.expr) -> str | None:
        name = self.resolve(node)
        if name is not None and (name + ".").startswith("jax.config.config."):
            return name.replace("jax.config.config", "jax.config", 1)
        return name


def _are_buffers(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "device_buffers"


def lines_of_pjit(source: str) -> list[int]:
    """Returns the lines of a source where pjit is not called or a decorator, or its call cannot be rewritten."""
    uses = _PjitUses(source, ast.parse(source))
    uses.find()
    return sorted(uses.lines)


class _PjitUses(NameEdits):
    """Collects the lines where pjit stays; its edits are not used."""

    lines: set[int]

    def find(self) -> list[Edit]:
        self.lines = set()
        return super().find()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = [each for each in node.decorator_list if self.resolve(each) != PJIT]
        node.decorator_list, every = decorators, node.decorator_list
        super().visit_FunctionDef(node)
        node.decorator_list = every

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call):
        is_partial = self.resolve(node.func) == "functools.partial" and bool(node.args)
        function = node.args[0] if is_partial else node.func
        if self.resolve(function) != PJIT:
            return self.generic_visit(node)
        if call_rewrites.rewrite_call(self, self.resolve(node.func) or "", node) is None:
            self.lines.add(node.lineno)
        for each in [*node.args[is_partial:], *(keyword.value for keyword in node.keywords)]:
            self.visit(each)
        return None

    def visit_Attribute(self, node: ast.Attribute):
        if self.resolve(node) == PJIT:
            self.lines.add(node.lineno)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name):
        if self.imported(node.id) == PJIT:
            self.lines.add(node.lineno)


def _is_in_position(call: ast.Call, name: str, parameters: list[str]) -> bool:
    """Returns True if a keyword and all before it can be passed by position, in the same order."""
    given = [None] * len(call.args) + [keyword.arg for keyword in call.keywords]
    number = given.index(name)
    return all(each in (None, parameter) for each, parameter in zip(given[: number + 1], parameters, strict=False))


def _keyword_span(keyword: ast.keyword) -> Span:
    assert keyword.end_lineno is not None, "ast.parse gives every node an end"
    assert keyword.end_col_offset is not None, "ast.parse gives every node an end"
    return Span(keyword.lineno, keyword.col_offset, keyword.end_lineno, keyword.end_col_offset)


def _span_with_comma(call: ast.Call, keyword: ast.keyword) -> Span:
    """Returns the span of a keyword and of the comma that parts it from its neighbour."""
    span = _keyword_span(keyword)
    spans = sorted([*map(span_of, call.args), *map(_keyword_span, call.keywords)])
    number = spans.index(span)
    if number > 0:
        before = spans[number - 1]
        return span._replace(first_line=before.last_line, first_column=before.last_column)
    if len(spans) > 1:
        return span._replace(last_line=spans[1].first_line, last_column=spans[1].first_column)
    return span
