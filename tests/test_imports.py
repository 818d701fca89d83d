"""Arrows between rooms point one way: what each room of the package may import, and that importing it stays cheap."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import WITHOUT_LUXURY

PACKAGE = Path(__file__).parents[1] / "shardformer"

# From the bottom up: a package may import itself and the packages above it in this table.
LAYERS = (
    ("errors", "messages"),
    ("child_process", "files", "jax_releases", "tables"),
    ("config", "storage", "user_code"),
    ("collectives", "exact"),
    ("kernels",),
    ("devices",),
    ("data",),
    ("parallel",),
    ("layout",),
    ("checkpoint", "shards"),
    ("model", "logs"),
    ("inference", "optim"),
    ("training",),
    ("adapters", "experts", "objectives", "quantized"),
    ("analysis", "convert", "legacy"),
    ("start_messages",),
    ("session",),
    ("sweep",),
    ("bench", "course"),
    ("cli",),
    ("__main__",),
)
# Packages that may import exactly these, whatever lies above them.
ALLOWED = {"legacy": {"errors", "files", "jax_releases", "tables", "devices", "config"}}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# The folder of a feature has files of several layers: by the end of their names, in which package they would lie.
ENDINGS = {
    "objectives": {"objective": "config", "keys": "config", "model": "model"},
    "adapters": {"keys": "config", "layer": "shards", "lora": "model"},
    "experts": {"keys": "config", "product": "kernels", "layout": "layout", "layer": "shards", "bias": "optim"},
    "quantized": {"keys": "config", "matrix": "kernels", "products": "kernels", "weights": "layout",
                  "reading": "model"},
}  # fmt: skip


def room(path: Path) -> str:
    return find_room(path.relative_to(PACKAGE).with_suffix("").parts)


def find_room(parts: Sequence[str]) -> str:
    """Returns the package in whose layer a module lies, which is given by the parts of its name."""
    package, *rest = parts
    ending = rest[-1].rpartition("_")[2] if rest else ""
    return ENDINGS.get(package, {}).get(ending, package)


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "shardformer":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardformer."):
            package, *rest = node.module.split(".")[1:]
            names = [alias.name for alias in node.names] if package in ENDINGS and not rest else [".".join(rest)]
            rooms |= {find_room((package, name)) for name in names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("shardformer.")]
            rooms |= {find_room(name.split(".")[1:]) for name in names}
    return rooms


def wrong_imports(importer: str, source: str) -> list[str]:
    return [
        f"{importer} imports {imported}"
        for imported in sorted(imported_rooms(source) - {importer})
        if LEVEL[imported] >= LEVEL[importer] or imported not in ALLOWED.get(importer, LEVEL)
    ]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    if path != PACKAGE / "__init__.py":
        assert not wrong_imports(room(path), path.read_text())


def test_a_wrong_import_is_noticed():
    assert wrong_imports("shards", "from shardformer import model") == ["shards imports model"]
    assert wrong_imports("kernels", "from shardformer.shards import Dropout") == ["kernels imports shards"]
    assert wrong_imports("kernels", "from shardformer.parallel import mesh") == ["kernels imports parallel"]
    assert wrong_imports("model", "from shardformer.objectives import teacher") == ["model imports objectives"]
    assert not wrong_imports("model", "from shardformer.objectives.objective import Objective")
    assert wrong_imports("layout", "from shardformer.experts import expert_layer") == ["layout imports shards"]
    assert not wrong_imports("layout", "from shardformer.experts import expert_layout, expert_keys")
    assert not wrong_imports("kernels", "from shardformer import collectives")
    assert not wrong_imports("kernels", "from shardformer.collectives import vary")
    assert wrong_imports("legacy", "from shardformer import model, files") == ["legacy imports model"]
    assert wrong_imports("optim", "def f():\n    from shardformer.training.trainer import Trainer") == [
        "optim imports training"
    ]


def importers_of_server(sources: dict[str, str]) -> list[str]:
    """Returns the files, besides its own and those of commands, that import the server or its engine."""
    allowed = ("inference/serve/", "cli/")
    return [name for name, source in sources.items()
            if "shardformer.inference.serve" in source and not name.startswith(allowed)]  # fmt: skip


def test_only_commands_import_the_server():
    assert not importers_of_server({str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")})


def test_import_of_the_server_is_noticed():
    line = "from shardformer.inference.serve.engine import Engine"
    assert importers_of_server({"training/loop.py": line, "cli/x.py": line}) == ["training/loop.py"]


def repeated_names(paths) -> list[str]:
    names = [path.name for path in paths if not path.name.startswith("__")]
    return sorted({name for name in names if names.count(name) > 1})


def test_a_file_name_means_one_thing():
    assert repeated_names(PACKAGE.rglob("*.py")) == []


def test_repeated_file_name_is_noticed():
    paths = [Path("a/mesh.py"), Path("b/mesh.py"), Path("a/__init__.py"), Path("b/__init__.py"), Path("b/lora.py")]
    assert repeated_names(paths) == ["mesh.py"]


def global_names(source: str) -> set[str]:
    """Returns the names of the global view that a source uses: shardings of arrays, and the map from shards to them."""
    names = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return names & {"NamedSharding", "shard_map"}


@pytest.mark.parametrize(
    "files", ["collectives.py", "shards/*.py", "kernels/*.py", "parallel/*.py", "*/*_layer.py", "*/*_product.py"]
)
def test_shard_view_knows_no_global_arrays(files):
    for path in PACKAGE.glob(files):
        assert not global_names(path.read_text()), path


def test_names_of_the_global_view_are_noticed():
    assert global_names("f = jax.shard_map(body, mesh=mesh)") == {"shard_map"}
    assert global_names("def f(x): return NamedSharding(x, P())") == {"NamedSharding"}
    assert not global_names('"""Under shard_map( no NamedSharding exists."""')


def imports_haiku(source: str) -> bool:
    names = [alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == "haiku" for name in names)


def test_kernels_know_no_modules():
    for path in (p for p in PACKAGE.rglob("*.py") if room(p) == "kernels"):
        assert not imports_haiku(path.read_text()), path


def test_module_in_a_kernel_is_noticed():
    assert imports_haiku("def f():\n    import haiku as hk")
    assert imports_haiku("from haiku.initializers import Constant")
    assert not imports_haiku('"""Used by haiku modules."""\nimport jax')


def find_imports(module: str, source: str) -> set[str]:
    """Returns what a module imports for more than its types, late imports in functions included."""
    tree, imported = ast.parse(source), set()
    of_types = set()
    if "TYPE_CHECKING" in source:
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        of_types = {each for node in tests if "TYPE_CHECKING" in ast.dump(node.test) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in of_types and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imported - {module}


def find_circles(sources: dict[str, str]) -> list[set[str]]:
    """Returns the sets of modules that import each other, by themselves or by way of others."""
    graph = {module: find_imports(module, source) & sources.keys() for module, source in sources.items()}
    while leaves := {module for module, imported in graph.items() if not imported & graph.keys()}:
        graph = {module: imported for module, imported in graph.items() if module not in leaves}
    return [{module, *(imported & graph.keys())} for module, imported in graph.items()]


def read_modules() -> dict[str, str]:
    """Returns the source of every module but the packages', whose `__init__` gathers the names of their modules."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path.read_text() for path in paths}


def test_modules_import_each_other_in_no_circle():
    assert find_circles(read_modules()) == []


def test_circle_by_a_late_import_is_noticed():
    late, types = "def f():\n    from p import a", "if TYPE_CHECKING:\n    from p import a"
    assert find_circles({"p.a": "from p.b import f", "p.b": late}) == [{"p.a", "p.b"}, {"p.a", "p.b"}]
    assert find_circles({"p.a": "from p.b import f", "p.b": types, "p.c": "from p import a, b"}) == []


MOST_MODULES, MOST_LINES = 161, 20_110  # of this package, examples in docstrings included; 286 and 35,688 once
FEATURES = ("adapters.adapter_layer", "adapters.lora", "analysis.liveness", "checkpoint.bucket_store", "convert",
            "config.depth", "data.chat.c", "data.document_sketches", "data.hf_tokenizer", "data.known_texts",
            "data.near_copies", "data.removal", "data.sketch_file", "data.word_hashes", "exact", "experts.expert_l",
            "experts.grouped", "experts.router", "inference.serve", "optim.average",
            "kernels.fused_attention", "objectives.distillation", "objectives.mtp", "objectives.policy",
            "objectives.preference", "objectives.reward", "objectives.rollouts", "objectives.teacher",
            "objectives.user", "objectives.answers", "parallel.ring_attention", "parallel.pipeline",
            "quantized.code", "quantized.int8", "quantized.packed", "quantized.quantized", "storage.bucket.",
            "training.example_gradients", "training.monitor", "training.non_finite", "training.rollback",
            "training.rolling_guard", "training.step_statistics")  # fmt: skip
PRINT_MODULES = """
import sys
from shardformer.__main__ import main
from shardformer.data import builtin
beginning = builtin.text()[:20_000]  # is evaluated in a moment
builtin.text = lambda: beginning
main(["train", "tiny", "data=builtin", "steps=1", f"out={sys.argv[1]}"])
print(*(f"{name}={module.__file__}" for name, module in sys.modules.items() if name.startswith("shardformer")))
"""


# Drawing parameters, the sample, the curves and the events take two thirds of the run's time.
QUICKLY = f"""{WITHOUT_LUXURY}
import jax
from shardformer.logs import curves
from shardformer.model import Model
curves.draw_curves = lambda *_: None
Model.init = lambda model, seed: jax.device_put(
    jax.tree.map(lambda leaf: jax.numpy.ones(leaf.shape, leaf.dtype), model.shapes), model.shardings
)
"""


@pytest.fixture(scope="module")
def modules_of_a_run(tmp_path_factory) -> dict[str, Path]:
    """Returns the modules of this package, with their files, that `train tiny` imports."""
    return find_modules(tmp_path_factory.mktemp("run") / "out", QUICKLY)


def find_modules(out: Path, beginning: str = "") -> dict[str, Path]:
    command = [sys.executable, "-c", f"{beginning}{PRINT_MODULES}", str(out)]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    pairs = (word.partition("=") for word in done.stdout.splitlines()[-1].split())
    return {name: Path(path) for name, _, path in pairs}


def test_a_plain_run_imports_few_modules(modules_of_a_run):
    lines = sum(len(path.read_text().splitlines()) for path in modules_of_a_run.values())
    assert len(modules_of_a_run) <= MOST_MODULES
    assert lines <= MOST_LINES
    assert {"shardformer.session", "shardformer.training.loop"} <= modules_of_a_run.keys()


def test_a_plain_run_imports_no_feature_that_is_off(modules_of_a_run):
    beginnings = tuple(f"shardformer.{name}" for name in FEATURES)
    assert [name for name in modules_of_a_run if f"{name}.".startswith(beginnings)] == []


@pytest.mark.slow
def test_parts_that_are_left_out_import_nothing_more(modules_of_a_run, tmp_path):
    assert find_modules(tmp_path / "out").keys() == modules_of_a_run.keys()


EXPENSIVE = {"jax", "numpy", "tensorflow", "matplotlib", "haiku", "optax"}


def expensive_imports(code: str) -> set[str]:
    """Returns the expensive packages that a new process imports for some code."""
    script = f"import sys, runpy; sys.argv = ['x', '--help']\n{code}\nprint(*({EXPENSIVE} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import shardformer",
        "try: runpy.run_module('shardformer', run_name='__main__')\nexcept SystemExit: pass",
        "from shardformer.__main__ import main\nmain(['train', '--help'])",
        "from shardformer.__main__ import main\nassert main(['train', 'tiny', 'lrr=3']) == 2",
        "from shardformer.__main__ import main\nassert main(['train', 'tiny', 'mesh=3x2']) == 2",
        "from shardformer.__main__ import main\nassert main(['sweep', 'tiny', 'lr=1,x']) == 2",
    ],
    ids=["import", "help", "help of train", "wrong key", "wrong mesh", "wrong value of a sweep"],
)
def test_what_is_answered_at_once_imports_no_jax(code):
    assert expensive_imports(code) == set()


def test_train_imports_no_tensorflow_or_matplotlib_before_it_compiles():
    assert not expensive_imports("import shardformer.cli.train_command") & {"tensorflow", "matplotlib"}


ASK_ALL = """
from shardformer.__main__ import main
from shardformer.cli.commands import COMMANDS
for name, command in COMMANDS.items():
    assert main([name, '--help']) == 0
    assert not command.options or main([name, 'no_such_key=3']) == 2
    assert not command.options or main([name, '--no_such_key=3']) == 2
assert main(['no_such_command']) == 2
"""


def test_help_and_wrong_keys_of_all_commands_import_no_jax():
    """In one process, and no NumPy either: its import takes as long as all of these answers."""
    assert expensive_imports(ASK_ALL) == set()


@pytest.mark.slow
def test_expensive_import_is_noticed():
    assert expensive_imports("import shardformer.logs.curves") >= {"matplotlib"}
    assert {"jax", "haiku"} <= expensive_imports("import shardformer.model")
