"""The other edits of a file whose xmaps become shard_maps: how a mesh comes into scope, and the imports."""

import ast

from shardformer.legacy.migration.edits import Edit, Span, span_of
from shardformer.legacy.migration.xmap_calls import XMAP
from shardformer.legacy.source_names import ValueVisitor

MAPS = "jax.experimental.maps"
MESHES = {f"{MAPS}.mesh", f"{MAPS}.Mesh", "jax.sharding.Mesh", "jax.interpreters.pxla.Mesh"}
ENVIRONMENT = f"{MAPS}.thread_resources.env"
PXLA_ENVIRONMENT = "jax.interpreters.pxla.thread_resources.env"  # jax still has it; `mesh_scope` leaves it empty


class MeshEdits(ValueVisitor):
    """Finds the edits for meshes and imports.

    decided: the ids of the xmap calls that are replaced. keeps_xmaps: others stay, and still need the mesh in scope.
    home: the module of the helpers. left: the line and the reason for each use of jax.experimental.maps that stays.
    import_nodes: the imports of jax.experimental.maps.
    """

    def __init__(self, source: str, decided: set[int], keeps_xmaps: bool, home: str):
        super().__init__()
        self.source, self.decided, self.keeps_xmaps, self.home = source, decided, keeps_xmaps, home
        self.edits: list[Edit] = []
        self.left: list[tuple[int, str]] = []
        self.import_nodes: list[ast.Import | ast.ImportFrom] = []
        self._used_names: set[str] = set()

    def visit_With(self, node: ast.With):
        for item in node.items:
            mesh = self._entered_mesh(item.context_expr)
            if mesh is None:
                self.visit(item)
                continue
            target = ast.unparse(item.optional_vars) if item.optional_vars is not None else ""
            if self.keeps_xmaps or not isinstance(item.optional_vars, ast.Name | None):
                name = target or "mesh_of_xmaps"
                text = f"{mesh} as {name}, mesh_scope({name})"
            else:
                text = f"mesh_scope({mesh}) as {target}" if target else f"mesh_scope({mesh})"
            self._replace(span_of(item.context_expr, item.optional_vars), text, "mesh_scope")
        for statement in node.body:
            self.visit(statement)

    def _entered_mesh(self, node: ast.expr) -> str | None:
        """Returns the mesh that a with statement enters, as source text: a call, or what is called a mesh.

        jax.jit, unlike pjit, does not see a mesh that `with mesh:` enters.
        """
        name = node.id if isinstance(node, ast.Name) else None
        value = self.assigned(name) if name is not None else node
        if isinstance(value, ast.Call) and self.resolve(value.func) in MESHES:
            return self._mesh(value) if name is None else name
        last = name or (node.attr if isinstance(node, ast.Attribute) else "")
        return ast.unparse(node) if last == "mesh" or last.endswith("_mesh") else None

    def visit_Assign(self, node: ast.Assign):
        if self.resolve(node.targets[0]) != ENVIRONMENT:
            return self.generic_visit(node)
        value = node.value
        makes_environment = isinstance(value, ast.Call) and self.resolve(value.func) == f"{MAPS}.ResourceEnv"
        mesh = value.args[0] if isinstance(value, ast.Call) and makes_environment and value.args else None
        if mesh is None:
            self._leave(node, "what is assigned to thread_resources.env is not ResourceEnv(mesh, ...)")
        else:
            text = self._mesh(mesh) if isinstance(mesh, ast.Call) else ast.unparse(mesh)
            original = f"{ast.get_source_segment(self.source, node)}; " if self.keeps_xmaps else ""
            if original:
                self._keep_names(node)
            self._replace(span_of(node), f"{original}set_mesh({text})", "set_mesh")
        return None

    def visit_Call(self, node: ast.Call):
        if id(node) in self.decided:
            return  # with all that is in it
        jit = node.args[0] if self.resolve(node.func) == "functools.partial" and node.args else node.func
        if self.resolve(jit) == "jax.jit" and any(keyword.arg == "backend" for keyword in node.keywords):
            self._replace(span_of(jit), "jit_on_backend", "jit_on_backend")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute):
        name = self.resolve(node) or ""
        if self.keeps_xmaps and name.startswith(MAPS):
            self._keep_names(node)
        elif name in (f"{ENVIRONMENT}.shape", f"{ENVIRONMENT}.physical_mesh") or name.startswith(
            f"{ENVIRONMENT}.shape."
        ):
            tail = name.removeprefix(ENVIRONMENT).replace(".physical_mesh", "", 1)
            self._replace(span_of(node), f"mesh_in_scope(){tail}", "mesh_in_scope")
        elif node.attr == "physical_mesh" and self._is_environment(node.value):
            self._replace(span_of(node), "physical_mesh()", "physical_mesh")
        elif name == f"{MAPS}.Mesh":
            self._replace(span_of(node), "Mesh")
        elif name.startswith(f"{MAPS}."):
            self._leave(node, "an xmap that stays" if name in XMAP else f"{name} has no counterpart")
        else:
            self.generic_visit(node)

    def _is_environment(self, node: ast.expr) -> bool:
        """Returns True for pxla's environment, and for a variable that was assigned it."""
        value = self.assigned(node.id) if isinstance(node, ast.Name) else node
        return isinstance(value, ast.Attribute) and self.resolve(value) == PXLA_ENVIRONMENT

    def visit_Name(self, node: ast.Name):
        name = self.resolve(node) or ""
        if self.keeps_xmaps and name.startswith(MAPS):
            self._keep_names(node)
        elif name == f"{MAPS}.Mesh":
            self._replace(span_of(node), "Mesh")
        elif name.startswith(MAPS):
            self._leave(node, "an xmap that stays" if name in XMAP else f"{name} has no counterpart")

    def visit_Import(self, node: ast.Import):
        if any(imported.name.startswith(MAPS) for imported in node.names):
            self.import_nodes.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom):
        if node.module == MAPS or (node.module == "jax.experimental" and "maps" in [n.name for n in node.names]):
            self.import_nodes.append(node)

    def import_edits(self, tree: ast.Module) -> list[Edit]:
        """Removes the imports that nothing uses any more; call it after the visit."""
        edits: dict[int, Edit] = {}
        for node in self.import_nodes:
            remaining = [
                imported
                for imported in node.names
                if (imported.asname or imported.name.partition(".")[0]) in self._used_names
                or not self._imports_maps(node, imported.name)
            ]
            if len(remaining) < len(node.names):
                text = unparse_import(node, remaining) if remaining else ""
                edits[id(node)] = Edit(span_of(node), text)
        keep_blocks_filled(tree, edits)
        return list(edits.values())

    def _imports_maps(self, node: ast.Import | ast.ImportFrom, name: str) -> bool:
        home = "" if isinstance(node, ast.Import) else f"{node.module}."
        return f"{home}{name}".startswith(MAPS)

    def _mesh(self, call: ast.Call) -> str:
        arguments = [ast.get_source_segment(self.source, argument) or "" for argument in call.args]
        return f"Mesh({', '.join([*arguments, *map(ast.unparse, call.keywords)])})"

    def _replace(self, span: Span, text: str, helper: str = ""):
        imports = ["from jax.sharding import Mesh"] if "Mesh(" in text or text == "Mesh" else []
        if helper:
            imports.append(f"from {self.home} import {helper}")
        self.edits.append(Edit(span, text, tuple(imports)))

    def _leave(self, node: ast.expr | ast.stmt, reason: str):
        self._keep_names(node)
        self.left.append((node.lineno, reason))

    def _keep_names(self, node: ast.AST):
        self._used_names |= {result.id for result in ast.walk(node) if isinstance(result, ast.Name)}


def unparse_import(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> str:
    """Returns the import of only these names."""
    shortened = ast.Import(names) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, names, node.level)
    return ast.unparse(shortened)


def keep_blocks_filled(tree: ast.Module, edits: dict[int, Edit]) -> None:
    """Turns a removal into `pass` if a block would become empty; `edits` by the id of the statement."""
    for node in ast.walk(tree):
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if not isinstance(node, ast.Module) and isinstance(block, list) and block:
                result = [edits.get(id(statement)) for statement in block]
                if all(edit is not None and not edit.text for edit in result) and result[0] is not None:
                    result[0].text = "pass"
