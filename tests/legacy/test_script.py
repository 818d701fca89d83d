"""`python -m shardformer legacy SCRIPT.py`: the unedited script runs as it does under `python`, with its names back."""

import os
import socket
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

import jax
import pytest

from shardformer.__main__ import main
from shardformer.legacy import frozen_dicts, install_options, spawned_script, uninstall
from shardformer.legacy.install import installed, short_report

ROOT = Path(__file__).parents[2]
with installed():
    REPORT = f"{short_report()}\n"
SCRIPT = """\
import sys
import jax, helper
from jax.experimental.maps import xmap

def fail():
    raise RuntimeError("RESOURCE_EXHAUSTED: the script's own")

if __name__ == "__main__":
    print(sys.argv[1:], helper.VALUE, jax.tree_map(abs, [-1]), xmap.__name__, __file__)
    action = sys.argv[1] if len(sys.argv) > 1 else ""
    if action == "fail": fail()
    if action == "missing": import no_such_module
    if action == "open": open("no such file")
    if action.isdigit(): sys.exit(int(action))
    if action == "message": sys.exit("a last word")
    if action == "interrupted": raise KeyboardInterrupt
    if action == "unfrozen": {}.unfreeze()
"""
OUTLIVED = """\
import atexit, os, pickle, sys, threading

class Kept: pass

def late(who):
    if who == "thread": threading.main_thread().join()
    import helper
    print(who, helper.VALUE, sys.argv, type(pickle.loads(pickle.dumps(Kept()))) is Kept)

threading.Thread(target=late, args=["thread"]).start()
atexit.register(late, "exit")
os.chdir("/")
print(os.path.exists(__file__), __name__, __spec__)
"""
SPAWNING = """\
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from jax.experimental.maps import xmap
import helper

class Result:
    def __init__(self, *values): self.values = values

def elsewhere(function, *arguments):
    with ProcessPoolExecutor(1, get_context(sys.argv[1])) as pool: return pool.submit(function, *arguments).result(600)

def child(of):
    return Result(xmap.__name__, helper.VALUE, __name__, sys.argv, os.getpid() != of.values[0])

def parent(of):
    return Result(os.getpid() != of.values[0], elsewhere(child, Result(os.getpid())).values)

if __name__ == "__main__":
    os.chdir("/")
    print(elsewhere(parent, Result(os.getpid())).values)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Yields the path of a script, and restores afterwards the state that a script may change."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    monkeypatch.setattr(spawn, "get_preparation_data", spawn.get_preparation_data)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 'beside it'\n")
    (folder / "script.py").write_text(SCRIPT)
    yield str(folder / "script.py")
    sys.modules.pop("helper", None)
    uninstall()


def run(*words: str) -> int | str | None:
    try:
        return main(["legacy", *words])
    except SystemExit as end:
        return end.code


def run_in_a_process(script: str, *arguments: str, cwd: Path):
    command = [sys.executable, "-m", "shardformer", "legacy", script, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def test_as_a_command_of_its_own(script, tmp_path):
    done = run_in_a_process("theirs/script.py", "--help", "x=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"['--help', 'x=1'] beside it [1] xmap {script}\n")
    assert done.stderr == REPORT


def test_verbose_launch_lists_the_names(script, capfd):
    assert run("--verbose", script) == 0
    assert "jax.tree_* (8), " in capfd.readouterr().err
    assert run(script) == 0
    err = capfd.readouterr().err
    assert err == REPORT
    assert len(err) < 100


def test_what_outlives_its_last_line(script, tmp_path):
    Path(script).write_text(OUTLIVED)
    done = run_in_a_process("theirs/script.py", "x", cwd=tmp_path)
    assert done.stderr == REPORT
    left = "beside it ['theirs/script.py', 'x'] True"
    assert done.stdout.splitlines() == ["True __main__ None", f"thread {left}", f"exit {left}"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_it_spawns_find_the_names_and_its_classes(script, tmp_path, method):
    Path(script).write_text(SPAWNING)
    done = run_in_a_process("theirs/script.py", method, cwd=tmp_path)
    child = ("xmap", "beside it", "__mp_main__", ["theirs/script.py", method], True)
    assert done.stdout == f"{(True, child)}\n"
    assert (done.returncode, done.stderr) == (0, REPORT)


STARTS = {
    "flags": 'os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"',
    "option": 'jax.config.update("jax_num_cpu_devices", 8)',
    "processes": 'jax.config.update("jax_num_cpu_devices", 8); jax.distributed.initialize("localhost:{port}", 1, 0)',
}


@pytest.mark.parametrize("start", STARTS)
def test_script_configures_the_backend_itself(script, tmp_path, start, monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        line = STARTS[start].replace("{port}", str(free.getsockname()[1]))
    Path(script).write_text(f"import os, jax\n{line}\nprint(jax.device_count())\n")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    done = run_in_a_process("theirs/script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_spawned_processes_get_the_options_of_the_script(script, monkeypatch):
    assert run("--strict", script) == 0
    data = spawn.get_preparation_data("a child")
    monkeypatch.setattr(sys, "argv", data["sys_argv"])
    uninstall()
    namespace = {"__name__": "__mp_main__", "left over": 1}
    spawned_script._run_in_spawned_process(namespace)
    assert install_options.strict
    assert namespace["xmap"] is sys.modules["jax.experimental.maps"].xmap
    assert (namespace["__file__"], namespace["__name__"], sys.argv) == (script, "__mp_main__", [script])
    assert "left over" not in namespace


def test_what_it_sees(script, capsys):
    assert run(script, "--check", "--strict") == 0
    assert capsys.readouterr().out == f"['--check', '--strict'] beside it [1] xmap {script}\n"
    assert not install_options.strict


@pytest.mark.parametrize(("action", "status"), [("0", 0), ("7", 7), ("message", "a last word")])
def test_it_exits_as_it_likes(script, action, status):
    assert run(script, action) == status


@pytest.mark.parametrize(
    ("action", "status", "last"),
    [
        ("fail", 1, "RuntimeError: RESOURCE_EXHAUSTED: the script's own"),
        ("missing", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("open", 1, "FileNotFoundError: [Errno 2] No such file or directory: 'no such file'"),
        ("interrupted", 130, "KeyboardInterrupt"),
        ("unfrozen", 1, frozen_dicts.ADVICE),
    ],
)
def test_its_mistakes_are_its_own(script, capsys, action, status, last):
    assert run(script, action) == status
    error = capsys.readouterr().err.splitlines()
    assert error[1] == "Traceback (most recent call last):"
    assert error[2].startswith(f'  File "{script}", line ')
    assert error[-1] == last
    assert not any("shardformer/legacy" in line for line in error[1:])


def test_a_script_that_does_not_parse(script, capsys):
    Path(script).write_text("print 'python 2'\n")
    assert run(script) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[1] == f'  File "{script}", line 1'
    assert error[-1].startswith("SyntaxError: Missing parentheses")


@pytest.mark.parametrize(
    ("flags", "strict", "partitionable"),
    [
        ([], False, True),
        (["--strict"], True, True),
        (["--legacy-random"], False, False),
        (["--legacy-random", "--strict"], True, False),
    ],
)
def test_options(script, flags, strict, partitionable):
    assert run(*flags, script) == 0
    assert (install_options.strict, jax.config.jax_threefry_partitionable) == (strict, partitionable)


def test_nothing_is_installed_before_the_script_is_found(capsys):
    assert run("nowhere.py") == 2
    assert capsys.readouterr().err == "shardformer: error: nowhere.py: no such script\n"
    assert not hasattr(jax, "tree_map")


@pytest.mark.parametrize(
    "words", [[], ["--check"], ["--migrate"], ["--stric", "a.py"], ["--strict"], ["--strict", "--check", "a.py"]]
)
def test_wrong_words(capsys, words):
    assert run(*words) == 2
    error = capsys.readouterr().err
    script_options = "[--verbose] [--strict] [--legacy-random]"
    expected = f"legacy takes {script_options} SCRIPT.py ..., --check PATH ..., or --migrate PATH ...; got "
    assert error == f"shardformer: error: {expected}{' '.join(words) or 'nothing'}\n"


def test_help_is_ours_before_the_script_and_its_own_after(script, capsys):
    assert run("--help") == 0
    assert "legacy --check PATH" in capsys.readouterr().out
    assert run("--strict", "-h", script) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert run(script, "-h") == 0
    assert capsys.readouterr().out.startswith("['-h']")
