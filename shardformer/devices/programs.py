"""Compiled programs, saved for the next start: by JAX's cache in one process, by our store in two or more."""

import contextlib
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from shardformer.config import Config
from shardformer.devices import program_folder, programs
from shardformer.devices.host import describe_processor
from shardformer.devices.program_folder import find_danger, make_private_folder, say_not_stored
from shardformer.messages import log
from shardformer.storage import BucketPath, bucket_path, location, on_disk

if TYPE_CHECKING:
    from shardformer.devices.program_store import ProgramStore

WRONG_WHEN_LOADED = (
    "XLA would load them with errors on several CPU devices (those of dp alone with zero=0 are kept, without lbfgs)"
)
# With hosts interleaved along dp, a process was given the program of another order, and computed wrong results. On CPU
# devices, only process 0 finds its entries.
WITHOUT_ORDER = (
    "JAX_COMPILATION_CACHE_DIR serves one process, as its entries lack the order of the devices in the mesh; "
    "program_cache=FOLDER serves several"
)


def keep_compiled_programs(config: Config, gather: Callable[[str], list[str]]) -> None:
    """Sets the folder of compiled programs; call it after the processes have joined, before the first `programs.jit`.

    In one process, a folder that JAX has already (JAX_COMPILATION_CACHE_DIR) stays. Two or more processes use a
    separate store, which needs JAX's cache to be off: XLA cannot serialize a program that this cache has loaded.
    """
    settings: Any = jax.config  # a type checker does not know its keys
    use_store(None)
    reject_unsafe_cache(config, jax.default_backend())
    if config.start.program_cache == "none" or not loads_correctly(config, jax.default_backend()):
        return
    if jax.process_count() > 1:
        from shardformer.devices.program_store import ProgramStore  # not imported for one process

        use_store(ProgramStore(find_shared_folder(config), gather))
        return
    if settings.jax_compilation_cache_dir:
        return
    folder = (
        find_folder() if config.start.program_cache == "auto" else on_disk(config.start.program_cache, "program_cache")
    )
    try:
        make_private_folder(folder)
    except OSError as error:  # JAX would warn at each program
        say_not_stored(f"{folder} cannot be made ({error.strerror})")
        return
    if danger := find_danger(folder):
        say_not_stored(danger)
        return
    program_folder.add_checksums()
    program_folder.replace_damaged_entries(folder)
    settings.update("jax_compilation_cache_dir", str(folder))
    quickest = settings.jax_persistent_cache_min_compile_time_secs  # JAX's default, 1, is more than most programs take
    settings.update("jax_persistent_cache_min_compile_time_secs", min(quickest, 0.01))


def reject_unsafe_cache(config: Config, platform: str) -> None:
    """Disables JAX's cache for this process if it would load a wrong program of this configuration.

    Commands, `layout.mesh.make` and `Model` call it, so that it also applies to `Trainer` and `verify` from Python.
    The cache may be in a folder that the user has chosen. It stays off, as other programs may be compiled at any time.
    """
    if not loads_correctly(config, platform):
        disable_cache(WRONG_WHEN_LOADED, is_chosen=config.start.program_cache not in ("auto", "none"))
    elif jax.process_count() > 1:
        disable_cache(WITHOUT_ORDER)


def disable_cache(why: str, is_chosen: bool = False) -> None:
    """Disables JAX's cache; prints why if the user has chosen a folder."""
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache:
        return
    if is_chosen or settings.jax_compilation_cache_dir:
        log.warning(f"compiled programs are not kept: {why}")
    settings.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX has looked at its settings already, if a program was compiled before


def loads_correctly(config: Config, platform: str) -> bool:
    """Returns whether the run's programs compute the same after XLA has written and read them.

    On a CPU they do not if collectives run in a loop and outside. The compiled program runs them in one order, but in
    a loaded one a loop no longer waits for the rest. Then two devices may wait in different collectives for ever, or
    one receives data of another collective: with zero=3 on 8 devices within some hundred steps (jax 0.10.2). With
    dp alone and zero=0, training has no collective in a loop but in the line search of lbfgs; drawing text has some in
    a loop, and all others wait for that loop.
    """
    if platform != "cpu" or config.parallel.devices == 1:
        return True
    known = not (config.optimizer.searches_rate or config.optimizer.is_code)
    return config.parallel.dp == config.parallel.devices and config.parallel.zero == 0 and known


def find_folder() -> Path:
    """Returns the folder for this kind of CPU: its programs would crash on a CPU that lacks their instructions."""
    return bucket_path.cache_folder() / f"programs-{describe_processor()}"


def find_shared_folder(config: Config) -> Path | BucketPath:
    """Returns the folder for all processes of a run: in this host's cache, or in the bucket of the run.

    A folder next to a run on a disk may have come with the run: an archive that this user has unpacked belongs to this
    user. Each process reads only its own files, so hosts may have separate folders.
    """
    if config.start.program_cache != "auto":
        return on_disk(config.start.program_cache, "program_cache")
    out = location(config.run.out)
    return out.parent / ".programs" if isinstance(out, BucketPath) else find_folder() / "processes"


_store: "ProgramStore | None" = None  # of this process; None keeps nothing


def use_store(store: "ProgramStore | None") -> None:
    """Makes programs that `jit` returns from now on load and save in a store."""
    global _store
    _store = store


def has_store() -> bool:
    """Returns whether a store keeps the programs of this process."""
    return _store is not None


def jit(function: Callable, *, out_shardings: Any, is_agreed: bool = True, **options: Any) -> Any:
    """Returns jax.jit(function, out_shardings, **options); with a store, its KeptProgram.

    is_agreed: False for the program by which the processes agree; see ProgramStore.load_or_compile.
    """
    options["out_shardings"] = out_shardings  # name the devices of the program; the processes' stores need them
    program = jax.jit(function, **options)
    return KeptProgram(program, options, _store, is_agreed) if _store else program


class KeptProgram:
    """A jitted function of positional arguments, whose compiled programs a store keeps. Keywords are static."""

    def __init__(self, jitted: Any, options: dict[str, Any], store: "ProgramStore", is_agreed: bool):
        self._jitted, self._store, self._is_agreed = jitted, store, is_agreed
        self._options = options
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    def lower(self, *arguments: Any, **static: Any) -> jax.stages.Lowered:
        """Returns the program for these arguments, lowered."""
        return self._jitted.lower(*arguments, **static)

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        signature = _describe(arguments, static)
        if signature not in self._programs:
            lowered = self.lower(*arguments, **static)
            devices = list(jax.tree.leaves(self._options["out_shardings"])[0].mesh.devices.flat)
            compiler_options = self._options.get("compiler_options")
            program = self._store.load_or_compile(lowered, devices, compiler_options, self._is_agreed)
            self._programs[signature] = program
        return self._programs[signature](*arguments)


def _describe(arguments: tuple, static: dict[str, Any]) -> Hashable:
    """Returns the types and shardings of the arguments, for each of which JAX compiles a program.

    The types of JAX 0.12 are compared by their parts: those of a loaded program's results equal no others.
    """
    leaves, tree = jax.tree.flatten(arguments)
    types = tuple((*_describe_type(jax.typeof(leaf)), getattr(leaf, "sharding", None)) for leaf in leaves)
    return tree, types, tuple(sorted(static.items()))


def _describe_type(type_: Any) -> tuple:
    return type_.shape, type_.dtype, type_.weak_type


class EarlyWork:
    """A thread that compiles programs before their first call, or imports a module; `wait` before that.

    XLA compiles without the interpreter's lock, mostly on one core; lowering needs the lock. JAX's `jit` calls a
    program that was lowered for the types and shardings of its arguments, and compiles none again. For others it
    compiles as if there were no thread.
    """

    def __init__(self, work: Callable[[], object]):
        def run() -> None:
            with contextlib.suppress(Exception):  # the first use repeats it, and raises there
                work()

        self._thread = threading.Thread(target=run, name="early work")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()


def saves_time() -> bool:
    """Returns whether a thread may compile: on two cores or more, and where no processes must agree on programs.

    On a GPU, XLA measures kernels while it compiles, which programs that run would disturb.
    """
    if jax.process_count() > 1 or programs.has_store() or jax.default_backend() == "gpu":
        return False
    return (os.cpu_count() or 1) > 1
