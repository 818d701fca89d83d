"""A script as the main module, with the names back: of this process, and of those that multiprocessing spawns from it.

A spawned process reads the script anew before it works. Here it is told to read this module instead: install() first.
"""

import builtins
import sys
import types
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path

import shardformer
from shardformer.legacy.install import install

ROOT = str(Path(shardformer.__file__).parents[1])


def run_as_main(script: str, **options: bool) -> None:
    """Runs a script, named by its absolute path, as python would: its module stays for what outlives its last line."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the latter is what a spawned process calls it
    spawn.get_preparation_data = _sending_here(script, options, spawn.get_preparation_data)
    _execute(script, vars(main))


def _read_again(namespace: dict) -> None:
    """What a spawned process does with the script; one that it spawns in its turn does the same."""
    script, options = sys.argv.pop()
    sys.argv[0] = script
    install(**options)
    spawn.get_preparation_data = _sending_here(script, options, spawn.get_preparation_data)
    namespace.clear()
    namespace.update(vars(types.ModuleType("__mp_main__")))
    _execute(script, namespace)


def _execute(script: str, namespace: dict) -> None:
    namespace.update(__file__=script, __cached__=None, __builtins__=builtins)
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), namespace)


def _sending_here(script: str, options: dict[str, bool], preparation: Callable[[str], dict]) -> Callable[[str], dict]:
    """multiprocessing's list of what a spawned process needs to know, with this module in the place of the script."""

    def preparation_data(name: str) -> dict:
        data = preparation(name)
        if data.get("init_main_from_path") == script:
            del data["init_main_from_path"]
            data["init_main_from_name"] = __name__
            data["sys_path"] = [*data["sys_path"], ROOT]
            data["sys_argv"] = [*data["sys_argv"], (script, options)]  # of all that is sent, this alone is ours to read
        return data

    return preparation_data


if __name__ == "__mp_main__":
    from shardformer.legacy import spawned_script

    spawned_script._read_again(globals())
