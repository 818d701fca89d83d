"""What else a file must change when its xmaps become shard_maps: how a mesh comes into scope, and the imports."""

import ast

from shardformer.legacy.migration.xmap_calls import XMAP
from shardformer.legacy.source_names import ValueVisitor

MAPS = "jax.experimental.maps"
MESHES = {f"{MAPS}.mesh", f"{MAPS}.Mesh", "jax.sharding.Mesh", "jax.interpreters.pxla.Mesh"}
ENVIRONMENT = f"{MAPS}.thread_resources.env"


class Edit:
    """The text that takes the place of a node."""

    def __init__(self, node: ast.AST, text: str, helpers: tuple = (), imports: tuple = ()):
        self.node, self.text, self.helpers, self.imports = node, text, helpers, imports


class MeshEdits(ValueVisitor):
    """Finds the edits for meshes and imports. `left`: (node, reason) for each use of jax.experimental.maps that stays.
    `import_nodes`: the statements that import it.

    decided: the ids of the xmap calls that are replaced. beside_xmaps: others stay, and need the mesh as they did.
    """

    def __init__(self, source: str, decided: set[int], beside_xmaps: bool):
        super().__init__()
        self.source, self.decided, self.beside_xmaps = source, decided, beside_xmaps
        self.edits: list[Edit] = []
        self.left: list[tuple[ast.AST, str]] = []
        self.import_nodes: list[ast.Import | ast.ImportFrom] = []
        self._kept_names: set[str] = set()

    def visit_With(self, node: ast.With):
        for item in node.items:
            mesh = self._entered_mesh(item.context_expr)
            if mesh is None:
                self.visit(item)
                continue
            target = ast.unparse(item.optional_vars) if item.optional_vars is not None else ""
            if self.beside_xmaps or not isinstance(item.optional_vars, ast.Name | None):
                name = target or "mesh_of_xmaps"
                text = f"{mesh} as {name}, jax.set_mesh({name})"
            else:
                text = f"jax.set_mesh({target} := {mesh})" if target else f"jax.set_mesh({mesh})"
            self._replace(_Span(item.context_expr, item.optional_vars or item.context_expr), text)
        for statement in node.body:
            self.visit(statement)

    def _entered_mesh(self, node: ast.expr) -> str | None:
        """The mesh that a with statement enters, as source text."""
        value = self.assigned(node.id) if isinstance(node, ast.Name) else node
        if not isinstance(value, ast.Call) or self.resolve(value.func) not in MESHES:
            return None
        return self._mesh(value) if value is node else node.id

    def visit_Assign(self, node: ast.Assign):
        if self.resolve(node.targets[0]) != ENVIRONMENT:
            return self.generic_visit(node)
        value = node.value
        mesh = value.args[0] if isinstance(value, ast.Call) and value.args else None
        if mesh is None or self.resolve(value.func) != f"{MAPS}.ResourceEnv":
            self._leave(node, "what is assigned to thread_resources.env is not ResourceEnv(mesh, ...)")
        elif isinstance(mesh, ast.Call) and "empty" in ast.unparse(mesh):
            self._leave(node, "leaves the mesh: enter the next one with `with jax.set_mesh(...)` instead")
        else:
            text = self._mesh(mesh) if isinstance(mesh, ast.Call) else ast.unparse(mesh)
            kept = f"{ast.get_source_segment(self.source, node)}; " if self.beside_xmaps else ""
            if kept:
                self._keep_names(node)
            self._replace(node, f"{kept}jax.set_mesh({text})")
        return None

    def visit_Call(self, node: ast.Call):
        if id(node) in self.decided:
            return  # with all that is in it
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute):
        name = self.resolve(node) or ""
        if self.beside_xmaps and name.startswith(MAPS):
            self._keep_names(node)
        elif name in (f"{ENVIRONMENT}.shape", f"{ENVIRONMENT}.physical_mesh") or name.startswith(
            f"{ENVIRONMENT}.shape."
        ):
            tail = name.removeprefix(ENVIRONMENT).replace(".physical_mesh", "", 1)
            self._replace(node, f"jax.sharding.get_mesh(){tail}", imports=("import jax",))
        elif name == f"{MAPS}.Mesh":
            self._replace(node, "Mesh", imports=("from jax.sharding import Mesh",))
        elif name.startswith(f"{MAPS}."):
            self._leave(node, "an xmap that stays" if name in XMAP else f"{name} has no counterpart")
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name):
        name = self.resolve(node) or ""
        if self.beside_xmaps and name.startswith(MAPS):
            self._keep_names(node)
        elif name == f"{MAPS}.Mesh":
            self._replace(node, "Mesh", imports=("from jax.sharding import Mesh",))
        elif name.startswith(MAPS):
            self._leave(node, "an xmap that stays" if name in XMAP else f"{name} has no counterpart")

    def visit_Import(self, node: ast.Import):
        if any(imported.name.startswith(MAPS) for imported in node.names):
            self.import_nodes.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom):
        if node.module == MAPS or (node.module == "jax.experimental" and "maps" in [n.name for n in node.names]):
            self.import_nodes.append(node)

    def import_edits(self, tree: ast.Module) -> list[Edit]:
        """Takes the imports away that nothing uses any more; call it after the visit."""
        edits: list[Edit] = []
        for node in self.import_nodes:
            kept = [
                imported
                for imported in node.names
                if (imported.asname or imported.name.partition(".")[0]) in self._kept_names
                or not self._imports_maps(node, imported.name)
            ]
            if len(kept) < len(node.names):
                text = ast.unparse(type(node)(**{**vars(node), "names": kept})) if kept else ""
                edits.append(Edit(node, text))
        removed = {id(edit.node): edit for edit in edits if not edit.text}
        for node in ast.walk(tree):
            for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
                if isinstance(block, list) and block and all(id(statement) in removed for statement in block):
                    removed[id(block[0])].text = "pass"  # a block is never empty
        return edits

    def _imports_maps(self, node: ast.Import | ast.ImportFrom, name: str) -> bool:
        home = "" if isinstance(node, ast.Import) else f"{node.module}."
        return f"{home}{name}".startswith(MAPS)

    def _mesh(self, call: ast.Call) -> str:
        arguments = [ast.get_source_segment(self.source, argument) for argument in call.args]
        return f"Mesh({', '.join([*arguments, *map(ast.unparse, call.keywords)])})"

    def _replace(self, node: ast.AST, text: str, imports: tuple = ("import jax", "from jax.sharding import Mesh")):
        self.edits.append(Edit(node, text, imports=imports))

    def _leave(self, node: ast.AST, reason: str):
        self._keep_names(node)
        self.left.append((node, reason))

    def _keep_names(self, node: ast.AST):
        self._kept_names |= {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


class _Span:
    """From the start of one node to the end of another."""

    def __init__(self, first: ast.AST, last: ast.AST):
        self.lineno, self.col_offset = first.lineno, first.col_offset
        self.end_lineno, self.end_col_offset = last.end_lineno, last.end_col_offset
