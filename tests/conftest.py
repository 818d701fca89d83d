"""Eight CPU devices, strict promotion, no network: set before anything touches a device."""

import contextlib
import gc
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path

import jax
import jax.experimental.pallas.tpu  # JAX 0.12 compiles anew what it compiled before this import
import pytest

from shardformer.layout import mesh
from shardformer.messages import log
from shardformer.model import Model
from tests import runs, shared
from tests.defects import Defects
from tests.launch import QUICK_COMPILATION
from tests.training.uneven_run import uneven_words

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # TensorFlow then imports no Keras: 1.5 s in each process

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
mesh.use_cpu_devices(8, many_in_flight=True)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup would let the processes that tests start ignore it

# Tests share no compiled programs (see programs.loads_correctly), and write none into the user's folder.
jax.config.update("jax_enable_compilation_cache", False)
OWN_CACHE = "SHARDFORMER_CACHE" not in os.environ
if OWN_CACHE:
    os.environ["SHARDFORMER_CACHE"] = tempfile.mkdtemp(prefix="shardformer-tests-")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# With Python's own thresholds, collecting garbage among JAX's many long-lived objects takes a tenth of the time.
gc.freeze()
gc.set_threshold(50_000, 20, 50)


# These take longest, so they come first: then workers, which take a file at a time, end together. Files that wait for
# their processes are between files that compile.
LONG_FILES = (
    "tests/integration/test_random_keys.py",
    "tests/legacy/test_future_jax.py",
    "tests/training/test_stopping.py",
    "tests/integration/test_cookbook.py",
    "tests/training/test_plain_step_files.py",
    "tests/integration/test_two_processes.py",
    "tests/integration/test_pipeline.py",
    "tests/legacy/test_mesh_transformer.py",
    "tests/integration/test_invariants.py",
    "tests/analysis/test_verify_exact.py",
    "tests/training/test_steps_exactly.py",
    "tests/integration/test_expert_reference.py",
    "tests/devices/test_processes.py",
    "tests/integration/test_parity.py",
    "tests/checkpoint/test_processes.py",
    "tests/cli/test_base_model.py",
    "tests/legacy/test_processes.py",
    "tests/analysis/test_verify.py",
    "tests/integration/test_readme.py",
    "tests/bench/test_step_time.py",
    "tests/legacy/test_jax_xmap_test.py",
    "tests/checkpoint/test_bad_connection.py",
    "tests/checkpoint/test_bucket_run.py",
)


LEGACY = "tests/legacy/"
LEGACY_IN_SHORT_TIER = tuple(
    f"tests/legacy/test_{name}.py"
    for name in (
        "after_import", "check", "constraint", "custom_transforms", "flax_names",
        "gradient_programs", "missing_packages", "operation_programs", "package_stand_ins", "partitioned_function",
        "pjit", "pmap", "pmap_shardings", "pmap_uses", "removed_parts", "xmap", "xmap_messages")
)  # fmt: skip


# Slow tests of tools and of many cases; there are short ones of the same parts.
NIGHTLY_FILES = tuple(
    f"tests/{name}.py"
    for name in (
        "analysis/test_best_settings", "analysis/test_coordinates", "analysis/test_explain", "analysis/test_forecast",
        "analysis/test_memory", "analysis/test_tpu_bytes", "bench/test_race", "bench/test_step_time", "cli/test_qlora",
        "convert/test_hf", "inference/test_lm_eval_kinds", "inference/test_on_policy", "legacy/test_estimators",
        "legacy/test_gradient_programs", "legacy/test_operation_programs", "legacy/test_owners",
        "objectives/test_keys_of_objectives", "objectives/test_preference_references", "objectives/test_teacher",
        "optim/test_lbfgs", "optim/test_seeds", "scripts/test_example_scripts", "shards/test_float32_sums",
        "training/test_keys_of_features", "training/test_monitor")
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="leave out the full tier: see the markers in pyproject.toml")


def pytest_ignore_collect(collection_path, config):
    """Leaves legacy files out of the short tier before they are imported."""
    path = collection_path.as_posix()
    is_left_out = f"/{LEGACY}test_" in path and not path.endswith(LEGACY_IN_SHORT_TIER)
    return True if is_left_out and config.getoption("--short") else None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid.startswith(LEGACY) and not item.nodeid.startswith(LEGACY_IN_SHORT_TIER):
            item.add_marker("legacy")
        if item.nodeid.startswith(NIGHTLY_FILES) and is_left_out_of_short_tier(item):
            item.add_marker("nightly")
    if config.getoption("--short"):
        kept, left_out = choose_short_tier(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    items.sort(key=rank_by_length)


def choose_short_tier(items) -> tuple[list, list]:
    """Returns the tests of the short tier and the others."""
    kept: list = []
    left_out: list = []
    for item in items:
        (left_out if is_left_out_of_short_tier(item) else kept).append(item)
    return kept, left_out


def is_left_out_of_short_tier(item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "multiprocess", "legacy", "nightly"))


def rank_by_length(item) -> int:
    file = item.nodeid.partition("::")[0]
    return LONG_FILES.index(file) if file in LONG_FILES else len(LONG_FILES)


class _Keeper(logging.Handler):
    def __init__(self, messages: list[str]):
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@pytest.fixture
def said():
    """Returns the list of what the package tells its user."""
    messages: list[str] = []
    keeper = _Keeper(messages)
    log.addHandler(keeper)
    yield messages
    log.removeHandler(keeper)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Returns the path of a corpus that is evaluated in a moment."""
    return runs.text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, text):
    """Returns the folder of an uninterrupted run with dropout."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with draw_by_interpretation():
        assert runs.train(*uneven_words(text), f"out={out}", curves=True) == 0
    return out


def split_drawn_parameters(model, seed):
    if type(model).draw_parameters is not Model.draw_parameters:  # draws further parameters by its own program
        return shared.init(model, seed)
    return jax.device_put(model.layout.weights.store(shared.drawn(model.config, seed)), model.shardings)


@contextlib.contextmanager
def draw_by_interpretation():
    """Draws initial parameters of the language model by interpretation; XLA compiles for longer than a second.

    test_initialisation.py compares the compiled draws of each mesh bitwise, and the interpreted ones with them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "init", split_drawn_parameters)
        yield


@pytest.fixture(scope="module", autouse=True)
def draw_quickly(request):
    with contextlib.nullcontext() if hasattr(request.module, "DRAWS_BY_XLA") else draw_by_interpretation():
        yield


@pytest.fixture
def broken(monkeypatch):
    """Breaks a function of the product for a negative twin: `broken(module, "function", wrong)`."""
    defects = Defects(monkeypatch)
    yield defects
    defects.check()


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees compiled programs before a process has Linux's 65,530 memory maps, at which XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 25_000:
        jax.clear_caches()
        gc.collect()


def pytest_make_parametrize_id(val):
    """Names a test the same in every worker: packed bytes may hold the time of day (gzip)."""
    return "bytes" if isinstance(val, bytes) else None


def pytest_unconfigure():
    # Leaves pytest no garbage to collect: execnet sends SIGINT to a worker that still runs 5 s after its session, and a
    # KeyboardInterrupt in a weak reference's callback is printed as an unraisable exception.
    gc.freeze()
    if OWN_CACHE:  # not in a worker, which has it from the process that started it
        shutil.rmtree(os.environ["SHARDFORMER_CACHE"], ignore_errors=True)
