"""`install()` puts the removed names back, so that old code runs unedited; `uninstall()` removes them."""

import collections
import contextlib
import importlib
import inspect
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from shardformer.jax_releases import avoid_faulty_fusions
from shardformer.legacy import (
    all_to_all_fix,
    array_members,
    config_options,
    flax_names,
    install_options,
    installed_libraries,
    package_stand_ins,
    removed_imports,
    removed_keywords,
    removed_names,
)
from shardformer.legacy.after_import import complete_after_import
from shardformer.legacy.pjit import AUTO

_names, _options = contextlib.ExitStack(), contextlib.ExitStack()  # each undoes what was done when it closes
_provided: list[str] = []
_current: dict[str, bool] | None = None
# Those of the tables, with jax first; flax_names puts flax's names back.
_LIBRARIES = ("jax", "jaxlib", "numpy", "haiku", "optax", "chex", "tensorflow_probability")
_AT_ONCE = ("jax.", "jaxlib.", "numpy.")
_NO_PROVIDER = object()  # of a name whose later spelling jax has dropped too


def install(*, legacy_random: bool = False, strict: bool = False) -> str:
    """Puts back every removed name that jax and NumPy lack; returns one line that lists them.

    The names of haiku, optax and flax come back when the program imports the library.

    legacy_random: draw random numbers as jax did then (jax_threefry_partitionable=False), so that initial parameters
    equal the old ones. strict: xmap raises where a result varies over an axis that its out_axes omit, and where
    axis_resources has an axis that nothing defines.

    Before the first use of a device, it also leaves out fusions that the installed release compiles wrongly.
    """
    global _current
    avoid_faulty_fusions()
    if _current is None:
        _put_names_back()
    _set_options(legacy_random, strict)
    _current = {"legacy_random": legacy_random, "strict": strict}
    return _report()


def uninstall() -> None:
    """Restores everything that `install()` changed but XLA_FLAGS, which XLA reads once."""
    global _current
    _options.close()
    _names.close()
    _current = None


@contextlib.contextmanager
def installed(**options: bool) -> Iterator[str]:
    """Installs for the length of a block, then restores the state before it."""
    before = _current
    try:
        yield install(**options)
    finally:
        if before is None:
            uninstall()
        else:
            install(**before)


def _put_names_back() -> None:
    # Old checkpoint code uses multiprocessing.pool after `import multiprocessing` alone, because ray imported it.
    importlib.import_module("multiprocessing.pool")
    _names.callback(_provided.clear)
    _names.callback(installed_libraries.put_back.clear)
    for library in _LIBRARIES:
        complete_after_import(library, _complete, _names)
    installed_libraries.put_back.update(removed_names.MODULES)
    config_options.put_back(_names)
    array_members.put_back(_names)
    flax_names.put_back(_names)
    removed_imports.advise_about_modules(_names)
    package_stand_ins.put_back(_names)


def _complete(library: types.ModuleType) -> None:
    """Puts back the names that a library lacks, and the advice about those that stay away."""
    every = removed_names.PROVIDERS | removed_names.CHANGED
    every = {name: provider for name, provider in every.items() if name.startswith(f"{library.__name__}.")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names that jax is about to drop, and those that NumPy may reuse
        result = {name: _provider(provider) for name, provider in every.items() if _lacks(name)}
    for name, value in result.items():
        if value is not _NO_PROVIDER:
            _put(name, value)
            _provided.append(name)
    installed_libraries.put_back.update(_provided)
    removed_imports.advise_about_names(_names, library.__name__)


class _LaterModule(types.ModuleType):
    """A library under an old name, which imports it at the first use."""

    def __getattr__(self, attribute: str):
        return getattr(importlib.import_module(self.__name__), attribute)


def _provider(provider: str) -> Any:
    if provider in _LIBRARIES and provider not in sys.modules:
        return _LaterModule(provider)
    try:
        return pkgutil.resolve_name(provider)
    except (ImportError, AttributeError):
        if provider.startswith("shardformer."):
            raise
        return _NO_PROVIDER


def _put(name: str, value: Any) -> None:
    home, _, attribute = name.rpartition(".")
    _set(_module(home) or _new_module(home), attribute, value)
    if isinstance(value, types.ModuleType):
        _register(name, value)


def _lacks(name: str) -> bool:
    """Returns True if a name is missing, or exists with another meaning."""
    home, _, attribute = name.rpartition(".")
    module = _module(home)
    if module is None or not hasattr(module, attribute):
        return True
    return name in KEEPS_ITS_MEANING and not KEEPS_ITS_MEANING[name](getattr(module, attribute))


def _accepts_axis_resources(pjit: Callable) -> bool:
    return "in_axis_resources" in inspect.signature(pjit).parameters


def _accepts_auto(jit: Callable) -> bool:
    try:
        jit(len, in_shardings=AUTO)
    except TypeError:
        return False
    return True


def _can_be_a_base(state: Any) -> bool:
    try:

        class State(state):
            pass
    except TypeError:
        return False
    return issubclass(State, tuple)


def _has_a_list_for_state(chain: Callable) -> bool:
    return isinstance(chain(importlib.import_module("optax").identity()).init(()), list)


def _exchanges_shared_values(_) -> bool:
    return all_to_all_fix.keeps_shared_shapes(jax.lax.all_to_all)


def _is_ours(function: Callable) -> bool:
    return function.__module__.startswith("shardformer.")


def _knows_named_einsum(_) -> bool:
    return hasattr(jax.lax, "xeinsum")


def _knows_named_shapes(_) -> bool:
    return hasattr(jax.core, "NamedShape")


def _accepts_capsules(from_dlpack: Callable) -> bool:
    return "dlpack" in inspect.signature(from_dlpack).parameters


def _accepts_jaxprs(gensym: Callable) -> bool:
    return "jaxprs" in inspect.signature(gensym).parameters


def _accepts_separate_primals(linearize: Callable) -> bool:
    return "primals" in inspect.signature(linearize).parameters


def _accepts_keywords(name: str) -> Callable[[Callable], bool]:
    old = set(removed_keywords.REMOVED_KEYWORDS[name])

    def takes_them(function: Callable) -> bool:
        parameters = inspect.signature(function).parameters.values()
        return old <= {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}

    return takes_them


def _needs_concrete(checkpoint: Callable) -> bool:
    try:
        checkpoint(lambda x: x, concrete=False)
    except (TypeError, NotImplementedError):
        return False
    return True


KEEPS_ITS_MEANING = {
    "jax.core.gensym": _accepts_jaxprs,
    "jax.experimental.custom_partitioning.custom_partitioning": _is_ours,
    "jax.interpreters.ad.linearize": _accepts_separate_primals,
    "jax.jit": _accepts_auto,
    "jax.lax.all_to_all": _exchanges_shared_values,
    "jax.lax.pswapaxes": _exchanges_shared_values,
    "jax.lax.with_sharding_constraint": _is_ours,
    "jax.numpy.einsum": _knows_named_einsum,
    **{f"jax.random.{name}": _knows_named_shapes for name in ("bernoulli", "normal", "truncated_normal", "uniform")},
    "jax.nn.initializers.variance_scaling": _knows_named_shapes,
    "jax.dlpack.from_dlpack": _accepts_capsules,
    **{name: _accepts_keywords(name) for name in removed_keywords.REMOVED_KEYWORDS},
    "jax.checkpoint": _needs_concrete,
    "jax.remat": _needs_concrete,
    "jax.experimental.pjit.pjit": _accepts_axis_resources,
    "optax.OptState": _can_be_a_base,
    "optax.chain": _has_a_list_for_state,
}


def _module(name: str) -> types.ModuleType | types.SimpleNamespace | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        home, _, attribute = name.rpartition(".")
        result = vars(sys.modules[home]).get(attribute) if home in sys.modules else None
        return result if isinstance(result, types.SimpleNamespace) else None  # as jax.ad is


def _new_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name, "What shardformer.legacy put back of this module.")
    _register(name, module)
    package, _, attribute = name.rpartition(".")
    parent = importlib.import_module(package)
    if not hasattr(parent, attribute):  # jax.config is an object today, and stays it
        _set(parent, attribute, module)
    return module


def _register(name: str, module: types.ModuleType) -> None:
    sys.modules[name] = module
    _names.callback(sys.modules.pop, name, None)


def _set(owner: types.ModuleType | types.SimpleNamespace, attribute: str, value: Any) -> None:
    if attribute in vars(owner):
        _names.callback(setattr, owner, attribute, vars(owner)[attribute])
    else:  # the module's own __getattr__ may know it
        _names.callback(delattr, owner, attribute)
    setattr(owner, attribute, value)


def _set_options(legacy_random: bool, strict: bool) -> None:
    _options.close()
    _options.callback(setattr, install_options, "strict", install_options.strict)
    install_options.strict = strict
    # Unedited code passes keys of jax.random.PRNGKey, which a later jax may reject by default.
    _options.callback(jax.config.update, "jax_legacy_prng_key", jax.config.jax_legacy_prng_key)  # type: ignore[attr-defined]
    jax.config.update("jax_legacy_prng_key", "allow")
    if legacy_random:
        before = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]  # jax adds options as attributes
        _options.callback(jax.config.update, "jax_threefry_partitionable", before)
        jax.config.update("jax_threefry_partitionable", False)


def _report() -> str:
    groups = collections.Counter(map(_group, _provided_at_once()))
    listed = ", ".join(f"{group} ({count})" for group, count in sorted(groups.items()))
    return f"{_report_start()}: {listed}{_report_options()}"


def _report_start() -> str:
    """Returns the first line of the report: the number of names without the list."""
    return f"shardformer.legacy: jax {jax.__version__}, provided {len(_provided_at_once())} names"


def _provided_at_once() -> list[str]:
    """Returns the names that do not wait for the import of a library, so that the report is always the same."""
    return [name for name in _provided if name.startswith(_AT_ONCE)]


def short_report() -> str:
    """Returns one line for a launch: the number of names and the options."""
    return f"{_report_start()}{_report_options()}; --verbose lists them"


def _report_options() -> str:
    return "".join(f"; {option}" for option, on in (_current or {}).items() if on)


def _group(name: str) -> str:
    home = name.rpartition(".")[0]
    return "jax.tree_*" if name.startswith("jax.tree") and home == "jax" else home
