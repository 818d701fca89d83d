"""Compiled programs are kept for the next start, in the folder that the user or JAX has chosen."""

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import storage
from shardformer.analysis.program_collectives import parse_collectives
from shardformer.data import load_corpus
from shardformer.devices import programs
from shardformer.devices.programs import EarlyWork, saves_time
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.training.trainer import Trainer
from tests import runs, shared, tiers
from tests.launch import QUICK, Forked, finished, start
from tests.surroundings import counting_compilations, hide_home, simulate_processes

TELLING = ("-c", f"""
import jax
jax.config.update("jax_log_compiles", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
{QUICK[1]}""")  # fmt: skip


def test_every_program_names_its_devices():
    """Only a store reads them, which one process rarely has: GRPO's reference failed on two processes only."""
    with pytest.raises(TypeError, match="out_shardings"):
        programs.jit(jnp.sin)


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    yield tmp_path
    for name in names:
        jax.config.update(name, before[name])


def unused_gather(text: str) -> list[str]:
    raise AssertionError(text)


def kept_in(**overrides) -> str | None:
    programs.keep_compiled_programs(shared.tiny(**{"mesh": "1x1"} | overrides), unused_gather)
    return jax.config.jax_compilation_cache_dir


def test_one_process_keeps_programs_in_the_cache_of_its_cpu(no_cache_yet):
    folder = Path(kept_in())
    assert folder.parent == no_cache_yet
    assert folder == programs.find_folder()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.01


@pytest.mark.usefixtures("no_cache_yet")
def test_a_lower_limit_of_compile_time_stays():
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.005)
    kept_in()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.005


def test_program_cache_names_the_folder(no_cache_yet):
    assert kept_in(program_cache=f"{no_cache_yet}/mine") == f"{no_cache_yet}/mine"


def find_store(monkeypatch, **overrides) -> str | None:
    """Returns the folder of the programs of two processes."""
    simulate_processes(monkeypatch, 2)
    stores = []
    monkeypatch.setattr(programs, "use_store", stores.append)
    assert kept_in(**overrides) is None  # the folder of JAX's own cache
    return stores[-1] and str(stores[-1].folder)


@pytest.mark.usefixtures("no_cache_yet")
@pytest.mark.parametrize(
    ("out", "cache", "folder"),
    [("s3://bucket/runs/mine", "auto", "s3://bucket/runs/.programs"), ("mine", "kept", "kept"), ("mine", "none", None)],
)
def test_folder_of_two_processes(monkeypatch, out, cache, folder):
    assert find_store(monkeypatch, out=out, program_cache=cache) == folder


@pytest.mark.parametrize("out", ["{}/strangers/run", "{}/strangers/new"])
def test_programs_that_came_with_a_run_are_not_loaded(no_cache_yet, monkeypatch, out):
    """Whoever unpacks an archive owns its folders; a program is code."""
    (no_cache_yet / "strangers" / ".programs").mkdir(parents=True, mode=0o700)
    folder = find_store(monkeypatch, out=out.format(no_cache_yet))
    assert folder == str(programs.find_folder() / "processes")


@pytest.mark.usefixtures("no_cache_yet")
def test_program_cache_none_keeps_nothing():
    assert kept_in(program_cache="none") is None


def test_the_folder_of_jax_stays(no_cache_yet):
    jax.config.update("jax_compilation_cache_dir", f"{no_cache_yet}/jax")
    assert kept_in() == f"{no_cache_yet}/jax"


LBFGS = {"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0}


WRONG = "compiled programs are not kept: XLA would load them with errors"


@pytest.mark.parametrize(
    "how", [{"mesh": "4x2"}, {"mesh": "8x1", "zero": 1}, {"mesh": "8x1", "zero": 3}, {"mesh": "8x1"} | LBFGS]
)
def test_programs_that_xla_loads_with_errors_are_not_kept(no_cache_yet, how):
    assert kept_in(**how) is None
    assert not jax.config.jax_enable_compilation_cache
    assert not programs.loads_correctly(shared.tiny(**how), "cpu")
    assert programs.loads_correctly(shared.tiny(**how | {"mesh": "1x1"}), "cpu")
    assert programs.loads_correctly(shared.tiny(**how), "tpu")


@pytest.mark.parametrize(("chosen", "said"), [({}, ""), ({"program_cache": "mine"}, WRONG)])
def test_unsafe_programs_are_reported_if_a_folder_was_chosen(no_cache_yet, capsys, chosen, said):
    for _ in range(2):
        kept_in(mesh="4x2", **chosen)
    printed = capsys.readouterr().err
    assert printed.startswith(said)
    assert printed.count("\n") == bool(said)


def call_mesh(config):
    mesh.make(config)


def call_model(config):
    devices = np.array(jax.devices()[: config.parallel.devices]).reshape(config.parallel.mesh_shape)
    Trainer(config, jax.sharding.Mesh(devices, ("dp", "mp")))  # a mesh of the user's own


@pytest.mark.parametrize("call", [call_mesh, call_model])
def test_chosen_cache_is_off_for_unsafe_programs_from_python(no_cache_yet, capsys, call):
    jax.config.update("jax_compilation_cache_dir", f"{no_cache_yet}/jax")
    call(shared.tiny(mesh="1x1"))
    assert jax.config.jax_enable_compilation_cache
    call(shared.tiny(mesh="4x2"))
    assert not jax.config.jax_enable_compilation_cache
    assert capsys.readouterr().err.startswith(WRONG)


def test_several_processes_load_nothing_from_the_cache_of_jax(no_cache_yet, monkeypatch, capsys):
    jax.config.update("jax_compilation_cache_dir", f"{no_cache_yet}/jax")
    simulate_processes(monkeypatch, 2)
    stores = []
    monkeypatch.setattr(programs, "use_store", stores.append)
    kept_in(mesh="8x1", program_cache="kept")
    assert not jax.config.jax_enable_compilation_cache
    assert "JAX_COMPILATION_CACHE_DIR serves one process" in capsys.readouterr().err
    assert str(stores[-1].folder) == "kept"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("shape", "is_kept"), [tiers.at_night(("2x2", False)), tiers.at_night(("2x1", True))])
def test_verify_keeps_no_unsafe_program_in_a_chosen_folder(tmp_path, shape, is_kept):
    program = ("-c", f"import jax\njax.config.update('jax_compilation_cache_dir', {str(tmp_path)!r})\n{TELLING[1]}")
    status, _, error = finished(Forked("verify", "tiny", f"mesh={shape}", "layers=1", program=program))
    assert status == 0, error
    assert bool(list(tmp_path.glob("*-cache"))) == is_kept
    assert (WRONG in error) != is_kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"mesh": "8x1"}, {"mesh": "8x1", "optimizer": "muon"}, {"mesh": "4x1", "accum": 2, "loss_chunk": 4}]
)
def test_dp_alone_has_no_collective_in_a_loop(how):
    assert not any(find_collectives_in_loops(**how))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"mesh": "4x2"}, {"mesh": "8x1", "zero": 3}, {"mesh": "8x1"} | LBFGS])
def test_other_steps_have_collectives_in_loops(how):
    assert any(find_collectives_in_loops(**how))


def find_collectives_in_loops(**overrides) -> Iterator[bool]:
    """Yields for a step's programs and for an evaluation whether they have a collective in a loop."""
    t = shared.trainer(**overrides)
    evaluation = jax.jit(t.model.evaluate).lower(t.model.abstract, shared.batch())
    for lowered in (*t.lower(t.abstract, shared.batch()), evaluation):
        yield any(found.in_loop for found in parse_collectives(lowered.compile().as_text()))


@pytest.mark.multiprocess
def test_a_second_start_compiles_nothing_and_gives_the_same(tmp_path, text):
    words = ("train", "tiny", "mesh=1x1", "layers=1", "steps=2", f"data={text}", f"program_cache={tmp_path}/kept")
    found = []
    for name in "ab":
        status, _, error = finished(Forked(*words, f"out={tmp_path}/{name}", program=TELLING))
        assert status == 0
        found.append({path.name for path in (tmp_path / "kept").glob("*-cache")})
    assert any(name.startswith("jit_train_step-") for name in found[0])
    assert found[0] == found[1]
    assert "Persistent compilation cache hit for 'jit_train_step'" in error
    assert runs.rows(tmp_path / "a") == runs.rows(tmp_path / "b")


@pytest.mark.usefixtures("no_cache_yet")
def test_a_cache_that_cannot_be_made_is_reported_once(monkeypatch, capsys):
    monkeypatch.setenv("SHARDFORMER_CACHE", "/dev/null/cache")
    assert kept_in() is None
    error = capsys.readouterr().err
    assert error.startswith("compiled programs are not kept: /dev/null/cache/programs-")
    assert "(Not a directory); program_cache=FOLDER" in error
    assert error.count("\n") == 1


# Compiles a program with the cache of a run, as `_run_with_cache` calls it.
COMPILING = ("-c", """
import sys
import jax
import jax.numpy as jnp
from shardformer import preset
from shardformer.devices.programs import keep_compiled_programs

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
keep_compiled_programs(preset("tiny").override({"mesh": "1x1", "program_cache": sys.argv[1]}), lambda text: [text])

@jax.jit
def kept(x):
    return jnp.tanh(x @ x) + jnp.sin(x)

print(float(kept(jnp.full((64, 64), 0.01)).sum()))
""")  # fmt: skip


def _run_with_cache(folder) -> tuple[str, str]:
    """Returns the number that the program computes and what is printed about the cache."""
    status, printed, error = finished(start(folder, program=COMPILING, environment={"JAX_COMPILATION_CACHE_DIR": ""}))
    assert status == 0, error
    return printed, error


@pytest.mark.multiprocess
def test_damaged_program_is_compiled_again_once(tmp_path):
    """Without a checksum some of these bits end the process by a signal, at every start."""
    first = _run_with_cache(tmp_path)
    entry = next(tmp_path.glob("jit_kept-*-cache"))
    sound = entry.read_bytes()
    damaged = bytearray(sound)
    for place in range(200, len(sound), 500):
        damaged[place] ^= 1
    entry.write_bytes(damaged)
    line = "a kept program is damaged and is compiled again: jit_kept\n"
    assert [_run_with_cache(tmp_path) for _ in range(2)] == [(first[0], line), first]


# The same program with JAX's own cache: prints whether its entry has a checksum, and what JAX does if it is damaged.
UNREPAIRED = ("-c", """
import sys, warnings
from pathlib import Path
import jax, jax.numpy as jnp
import zstandard

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
kept = jax.jit(lambda x: jnp.tanh(x @ x))
kept(jnp.ones((8, 8)))
entry, *_ = Path(sys.argv[1]).glob("jit__lambda*-cache")
print(zstandard.get_frame_parameters(entry.read_bytes()).has_checksum)
entry.write_bytes(b"damaged")
jax.clear_caches()
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    kept(jnp.ones((8, 8)))
print(*(str(each.message).partition("'")[0] for each in shown))
print(entry.read_bytes())
""")  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="JAX packs programs with zlib, which checks")
def test_cache_of_jax_still_needs_both_repairs(tmp_path):
    """If JAX adds a checksum, or replaces a damaged entry, one of the repairs in `program_folder` can be removed."""
    status, printed, error = finished(start(tmp_path, program=UNREPAIRED))
    assert status == 0, error
    has_checksum, warning, entry = printed.splitlines()
    assert has_checksum == "False"
    assert warning.startswith("Error reading persistent compilation cache entry for")
    assert entry == "b'damaged'"


@pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="JAX packs programs with zlib, which checks")
def test_every_flipped_bit_of_a_program_is_noticed(no_cache_yet):
    kept_in()
    import zstandard

    packed = zstandard.ZstdCompressor().compress(bytes(range(256)) * 20)
    for place in range(len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 1
        with pytest.raises(zstandard.ZstdError):
            zstandard.ZstdDecompressor().decompress(bytes(damaged))


def test_full_disk_under_the_cache_is_reported_once(no_cache_yet, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    kept_in()
    show = warnings.showwarning
    for program in ("jit_a", "jit_b"):
        problem = f"Error writing persistent compilation cache entry for '{program}': OSError: [Errno 28] No space left"
        show(UserWarning(problem), UserWarning, "compiler.py", 1)
    show(UserWarning("another"), UserWarning, "other.py", 1)
    error = capsys.readouterr().err
    assert error.startswith("compiled programs are not kept: OSError: [Errno 28] No space left; program_cache=FOLDER")
    assert error.count("\n") == 1
    assert shown == ["another"]


def test_an_unknown_home_makes_no_folder_named_tilde(monkeypatch, tmp_path):
    hide_home(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("SHARDFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = storage.cache_folder()
    assert folder == tmp_path / f"shardformer-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)  # another user may have made it first
    with pytest.raises(UsageError, match="set SHARDFORMER_CACHE to a folder"):
        storage.cache_folder()


def test_token_ids_without_a_cache_name_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDFORMER_CACHE", "/dev/null/cache")
    (tmp_path / "d.jsonl").write_text('{"text": "a text"}\n' * 9)
    with pytest.raises(RunError, match=r"the token ids of .* cannot be kept in /dev/null/cache: Not a directory"):
        load_corpus(shared.tiny(data=str(tmp_path / "d.jsonl"), tokenizer="bytes", vocab=0))


def compile_in_thread(program, *arguments):
    EarlyWork(lambda: program.lower(*arguments).compile()).wait()


def make_arguments(sharding):
    placed = jax.make_array_from_callback((8,), sharding, np.arange(8, dtype=np.float32).__getitem__)
    return jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding), placed


def test_first_call_finds_the_compiled_program():
    mesh = jax.make_mesh((2,), ("dp",))
    abstract, placed = make_arguments(jax.NamedSharding(mesh, jax.P("dp")))

    def double(x, step):
        return x * 2 + step

    program = jax.jit(double, donate_argnums=0, out_shardings=abstract.sharding)
    with counting_compilations() as compiled:
        compile_in_thread(program, abstract, np.float32(0))
        result = program(placed, np.float32(1))
    assert np.asarray(result)[3] == 7
    assert compiled["jit(double)"] == 1


def test_other_shardings_are_compiled_by_the_call():
    mesh = jax.make_mesh((2,), ("dp",))
    abstract, _ = make_arguments(jax.NamedSharding(mesh, jax.P("dp")))
    _, placed = make_arguments(jax.NamedSharding(mesh, jax.P()))

    def triple(x):
        return x * 3

    program = jax.jit(triple)
    with counting_compilations() as compiled:
        compile_in_thread(program, abstract)
        result = program(placed)
    assert np.asarray(result)[3] == 9
    assert compiled["jit(triple)"] == 2


def test_failure_in_the_thread_is_left_to_the_call():
    def fail(x):
        raise UsageError("wrong")

    program = jax.jit(fail)
    compile_in_thread(program, 1.0)
    with pytest.raises(UsageError, match="wrong"):
        program(1.0)


def test_no_thread_on_one_core_or_with_a_store(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert saves_time()
    monkeypatch.setattr(programs, "_store", object())
    assert not saves_time()
    monkeypatch.setattr(programs, "_store", None)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert not saves_time()
