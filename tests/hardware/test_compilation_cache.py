"""Programs are kept for the next start, but for those of several processes, and where the user keeps them already."""

from pathlib import Path

import jax
import pytest

from shardformer.hardware import compilation_cache
from tests import runs, shared
from tests.launch import QUICK, Forked, finished

TELLING = ("-c", f"""
import jax
jax.config.update("jax_log_compiles", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
{QUICK[1]}""")  # fmt: skip


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    for name in names:
        jax.config.update(name, before[name])


def kept_in(**overrides) -> str | None:
    compilation_cache.keep_compiled_programs(shared.tiny(mesh="1x1", **overrides))
    return jax.config.jax_compilation_cache_dir


def test_one_process_keeps_its_programs_in_the_cache_of_this_kind_of_machine(no_cache_yet):
    folder = Path(kept_in())
    assert folder.parent == no_cache_yet
    assert folder == compilation_cache.find_folder()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1


@pytest.mark.usefixtures("no_cache_yet")
def test_who_keeps_quicker_programs_keeps_them_still():
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    kept_in()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.05


def test_a_folder_that_is_named_is_taken(no_cache_yet):
    assert kept_in(program_cache=f"{no_cache_yet}/mine") == f"{no_cache_yet}/mine"


@pytest.mark.usefixtures("no_cache_yet")
def test_several_processes_keep_nothing(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert kept_in() is None


@pytest.mark.usefixtures("no_cache_yet")
def test_none_keeps_nothing():
    assert kept_in(program_cache="none") is None


def test_what_jax_was_told_stays():
    assert kept_in() == jax.config.jax_compilation_cache_dir != str(compilation_cache.find_folder())


def test_a_second_start_compiles_nothing_and_gives_the_same(tmp_path, text):
    words = ("train", "tiny", "mesh=1x1", "layers=1", "steps=2", f"data={text}", f"program_cache={tmp_path}/kept")
    found = []
    for name in "ab":
        status, _, error = finished(Forked(*words, f"out={tmp_path}/{name}", program=TELLING))
        assert status == 0
        found.append({path.name for path in (tmp_path / "kept").glob("*-cache")})
    assert any(name.startswith("jit_update-") for name in found[0])
    assert found[0] == found[1]
    assert "Persistent compilation cache hit for 'jit_update'" in error
    assert runs.rows(tmp_path / "a") == runs.rows(tmp_path / "b")
