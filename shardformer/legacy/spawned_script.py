"""Runs a script as the main module, in this process and in every process that multiprocessing spawns from it.

A spawned process imports the script again before it works. Here it imports this module instead, which calls install().
"""

import builtins
import sys
import types
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import shardformer
from shardformer.legacy.install import install

ROOT = str(Path(shardformer.__file__).parents[1])


def run_as_main(script: str, **options: bool) -> None:
    """Runs a script, given by its absolute path, as python would; its module stays for threads that outlive it."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the name that a spawned process uses
    _redirect(script, options)
    _execute(script, vars(main))


def _run_in_spawned_process(namespace: dict) -> None:
    """Runs the script in a spawned process, and prepares the processes that it spawns in turn."""
    arguments: list[Any] = sys.argv
    script, options = arguments.pop()
    sys.argv[0] = script
    install(**options)
    _redirect(script, options)
    namespace.clear()
    namespace.update(vars(types.ModuleType("__mp_main__")))
    _execute(script, namespace)


def _execute(script: str, namespace: dict) -> None:
    namespace.update(__file__=script, __cached__=None, __builtins__=builtins)
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), namespace)


def _redirect(script: str, options: dict[str, bool]) -> None:
    """Makes multiprocessing start this module instead of the script."""
    redirected = _redirected(script, options, spawn.get_preparation_data)
    spawn.get_preparation_data = redirected  # type: ignore[assignment]  # the stubs fix the function's name


def _redirected(script: str, options: dict[str, bool], preparation: Callable[[str], dict]) -> Callable[[str], dict]:
    """Returns multiprocessing's preparation data for a spawned process, with this module instead of the script."""

    def preparation_data(name: str) -> dict:
        data = preparation(name)
        if data.get("init_main_from_path") == script:
            del data["init_main_from_path"]
            data["init_main_from_name"] = __name__
            data["sys_path"] = [*data["sys_path"], ROOT]
            data["sys_argv"] = [*data["sys_argv"], (script, options)]  # the one entry that this module can read
        return data

    return preparation_data


if __name__ == "__mp_main__":
    from shardformer.legacy import spawned_script

    spawned_script._run_in_spawned_process(globals())
