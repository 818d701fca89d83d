"""A plugin of pytest: JAX's private modules and test utilities under the names that the tests of jax 0.4.13 import.

A private name stands for its counterpart of today, or for what `install()` provides in public. Names without a
counterpart stay away, and their tests fail. The real modules stay as they are: JAX itself uses them.
"""

import contextlib
import functools
import importlib
import sys
import types
import unittest
import warnings

import jax
import jax.experimental.pjit
import jax.extend.random
import jax.interpreters.pxla
import numpy as np
from absl.testing import absltest, parameterized
from jax._src import core, op_shardings, sharding_impls, test_util, util
from jax._src.lax import parallel
from jax.experimental import maps
from jax.sharding import Mesh
from jaxlib import xla_client

from shardformer import legacy
from shardformer.legacy import mesh_in_scope, pmap_shardings
from tests.legacy import jax_xmap_test
from tests.legacy.old_jax_words import in_todays_words


class _StandIn(types.ModuleType):
    """A private module as the tests of 0.4.13 import it: `names` first, then the module of today."""

    def __init__(self, module: types.ModuleType, **names):
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def _stand_in(name: str, **names) -> None:
    """Replaces an attribute of jax._src, which JAX itself has imported before."""
    home, _, attribute = name.rpartition(".")
    stand_in = _StandIn(importlib.import_module(name), **names)
    setattr(importlib.import_module(home), attribute, stand_in)
    sys.modules[name] = stand_in


def _new_module(name: str, **names) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(names)
    home, _, attribute = name.rpartition(".")
    setattr(importlib.import_module(home), attribute, module)
    sys.modules[name] = module


def _public(module, *names: str) -> dict:
    """Returns those of the names that a module has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: getattr(module, name) for name in names if hasattr(module, name)}


def _pmap_sharding_spec(shape, sharded_dim=0, sharded_dim_size=None) -> pmap_shardings.ShardingSpec:
    splits: list = [pmap_shardings.NoSharding()] * len(shape)
    if sharded_dim is None:
        return pmap_shardings.ShardingSpec(splits, [pmap_shardings.Replicated(sharded_dim_size)])
    splits[sharded_dim] = pmap_shardings.Unstacked(shape[sharded_dim])
    return pmap_shardings.ShardingSpec(splits, [pmap_shardings.ShardedAxis(0)])


def _hlo_sharding(op):
    return op if isinstance(op, xla_client.HloSharding) else xla_client.HloSharding.from_proto(op)


def _of_hlo_shardings(function):
    return lambda *ops: function(*map(_hlo_sharding, ops))


def _gspmd_sharding(sharding, ndim, device_or_backend_set=False):
    return sharding_impls.GSPMDSharding(sharding._device_assignment, sharding._to_xla_hlo_sharding(ndim))


def _provide_modules() -> None:
    pjit, public_pxla = jax.experimental.pjit, jax.interpreters.pxla
    keys = importlib.import_module("jax._src.random.prng")
    lowered = importlib.import_module("jax._src.pjit")._pjit_lower
    splits = [
        "Chunked", "NoSharding", "Replicated", "ShardedAxis", "ShardingSpec", "Unstacked", "spec_to_indices",
        "sharding_spec_sharding_proto", "make_sharded_device_array",
    ]  # fmt: skip
    xla_extension = importlib.import_module("jax.lib.xla_extension")
    _new_module("jax._src.lib.xla_extension", **vars(xla_extension))
    _new_module("jax._src.maps", **vars(maps))
    for name in ("spmd_lowering", "spmd_lowering_manual"):
        option = types.SimpleNamespace(value=getattr(jax.config, f"experimental_xmap_{name}"))
        setattr(jax._src.maps, name.upper(), option)  # type: ignore[attr-defined]
    prng = {name: getattr(jax.extend.random, name) for name in dir(jax.extend.random) if name.endswith("_impl")}
    _new_module("jax._src.prng", **vars(keys) | prng)
    specs = _public(public_pxla, *splits) | {"create_pmap_sharding_spec": _pmap_sharding_spec}
    _new_module("jax._src.sharding_specs", **specs)
    _stand_in("jax._src.api", pmap=jax.pmap, _cpp_pmap=jax.pmap)
    _stand_in("jax._src.interpreters.pxla", **_public(public_pxla, *splits, "Mesh", "shard_args"))
    _stand_in("jax._src.mesh", thread_resources=mesh_in_scope.thread_resources, EMPTY_ENV=mesh_in_scope.EMPTY_ENV)
    _stand_in(
        "jax._src.op_shardings",
        is_op_sharding_replicated=_of_hlo_shardings(op_shardings.is_hlo_sharding_replicated),
        are_op_shardings_equal=_of_hlo_shardings(op_shardings.are_hlo_shardings_equal),
        get_num_ways_dim_sharded=_of_hlo_shardings(op_shardings.get_num_ways_dim_sharded),
    )
    _stand_in(
        "jax._src.pjit",
        pjit=pjit.pjit, pjit_p=pjit.pjit_p, to_gspmd_sharding=_gspmd_sharding, _pjit_lower_cached=lowered,
    )  # fmt: skip
    _stand_in(
        "jax._src.sharding_impls",
        AUTO=pjit.AUTO, ParsedPartitionSpec=pjit.ParsedPartitionSpec, AxisEnv=core.AxisEnv,
        **_public(jax.sharding, "PmapSharding", "PositionalSharding"),
    )  # fmt: skip
    for name, value in _public(jax.core, "NamedShape", "raise_to_shaped", "axis_frame", "thread_local_state").items():
        setattr(core, name, value)
    core.axis_substitution_rules = {}  # type: ignore[attr-defined]
    util.curry = jax.curry  # type: ignore[attr-defined]
    parallel.pgather = jax.lax.pgather  # type: ignore[attr-defined]


def _counting(count_events):
    """A counter of 0.4.13, which fills a list, over one of today, which is a function."""

    @contextlib.contextmanager
    def count():
        counted = [0]
        with count_events() as events:
            yield counted
            counted[0] = events()

    return count


def _create_global_mesh(shape, axis_names):
    size = int(np.prod(shape))
    if len(jax.devices()) < size:
        raise unittest.SkipTest(f"needs {size} devices")
    return Mesh(np.array(jax.devices()[:size]).reshape(shape), axis_names)


def _with_and_without_mesh(case):
    both = (("", (), ()), ("Mesh", (("x", 2),), (("i", "x"),)))
    named = [{"testcase_name": name, "mesh": mesh, "axis_resources": resources} for name, mesh, resources in both]
    return parameterized.named_parameters(named)(test_util.with_mesh_from_kwargs(case))


def _assert_raises_regex(self, kind, words, *args, **kwargs):
    """Accepts our words and today's; those of the xmap tests are in another table."""
    words = getattr(words, "pattern", words)
    plain = words.replace("\\", "")
    ours = (ours for theirs, ours in jax_xmap_test.OUR_WORDS.items() if theirs in plain)
    return _expect(self, kind, next(ours, in_todays_words(words)), *args, **kwargs)


_expect = unittest.TestCase.assertRaisesRegex


def _provide_test_utilities() -> None:
    given = {
        "JaxTestLoader": absltest.TestLoader,
        "count_jit_and_pmap_compiles": _counting(test_util.count_jit_and_pmap_lowerings),
        "count_pjit_cpp_cache_miss": _counting(test_util.count_pjit_cpp_cache_miss),
        "create_global_mesh": _create_global_mesh,
        "skip_on_xla_cpu_mlir": functools.partial(lambda case: case),
        "with_and_without_mesh": _with_and_without_mesh,
    }
    for action in ("set", "restore"):
        for flag in ("spmd_lowering", "spmd_manual_lowering"):
            given[f"{action}_{flag}_flag"] = lambda *_: None
    for name, value in given.items():
        setattr(test_util, name, value)
    test_util.JaxTestCase.assertRaisesRegex = _assert_raises_regex
    test_util.JaxTestCase._default_global_config.pop("jax_legacy_prng_key", None)
    test_util.JaxTestCase._default_thread_local_config.pop("jax_legacy_prng_key", None)


legacy.install()
_provide_modules()
_provide_test_utilities()
if any("xmap_test" in argument for argument in sys.argv):
    jax_xmap_test._provide_primitive_rules()
