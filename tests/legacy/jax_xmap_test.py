"""Runs JAX's own last `tests/xmap_test.py` (tag jax-v0.4.30) against `shardformer.legacy`; writes what each case did.

JAX_XMAP_TEST=.../xmap_test.py python tests/legacy/jax_xmap_test.py RESULTS.json

Under jax 0.4.30 it runs the file as it is: so the list of cases that passed then was recorded. Under today's JAX the
file is as it was too. What users import comes from `shardformer.legacy.install()` alone; here are only JAX's private
modules under their old names, its test utilities, and the tables where the file's own primitives put their rules.
"""

import contextlib
import functools
import gc
import importlib.util
import json
import os
import sys
import types
import unittest

if __name__ == "__main__":  # a script, run by test_jax_xmap_test.py: whoever imports it keeps the flags
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("QUICK_COMPILATION", "")  # which an old jax may not know
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {flags}"

# What an error must say where the file under test expects legacy's words: the same facts, in ours or today's JAX's.
OUR_WORDS = {
    "specification must be a tree prefix of the corresponding value, got specification (['x'], ['x'], ['x'])": (
        r"in_axes\[2\] has a spec"
    ),
    "specification must be a tree prefix of the corresponding value, got specification ([['x'],": r"out_axes\[0\]",
    "Size of axis i (5) is not divisible": r"'i' has size 5, which is not divisible by the 4 .*'x', 'y'",
    "Failed to infer size of axes: i": r"the size of 'i' is unknown",
    "which implies that it has at least 2 dimensions": r"\['i', 'j', \.\.\.\].*shape is \(5,\)",
    "previously inferred to be 5": r"'i' has size 5 in .*size 6 in argument.*shape \(6,\), position 0",
    "asserts that it should be of rank 2, but the argument": r"\['i', None\], which asserts rank 2.*shape is \(5,\)",
    "asserts that it should be of rank 2, but the output": r"\['i', None\], which asserts rank 2.*shape is \(5, 2, 2\)",
    "xmap doesn't support negative axes in in_axes": r"in_axes has a negative position: {-1: 'i'}",
    "xmap doesn't support negative axes in out_axes": r"out_axes has a negative position: {-1: 'i'}",
    "requires the result of the xmapped function to have at least 1": r"{1: 'i'}",
    "All axes that were assigned resources": r"axis_resources has 'b', which nothing defines",
    "All axis names appearing in out_axes must": r"out_axes has 'c', which nothing defines",
    "In-scope resources are insufficient": r"'a' on 'x', but the mesh in scope has the axes \('y',\)",
    "distinct resources.*specified ('x', 'x') for axis a": r"'a' one resource twice: \('x', 'x'\)",
    "Axes `a` and `b` are both mapped to the resource `x`": r"'a'.*'b'.*'x'",
    "Axes `a` and `b` are both mapped to the resource `l`": r"'a'.*'b'.*'l'",
    "Axes `i` and `j` are both mapped to the resource `x`": r"'i'.*'x'",
    "outputs is broadcast along axis `b`": r"'a'.*'b'.*'x'",
    "outputs is broadcast along axis `i`": r"'i'.*'x'",
    "Named axes with loop resources assigned to them cannot be referenced": r"serial loop.*'i'",
    "Changing the physical mesh is not allowed": r"mesh",
    "Argument 1/1 compiled with": r"compiled with float32.* and called with int32",
}


def main(results_path):
    sys.argv[1:] = []  # the file under test parses the rest as JAX's flags
    if importlib.util.find_spec("jax._src.maps") is None:
        _provide_deleted_internals()
    module = _load(os.environ["JAX_XMAP_TEST"])
    gc.freeze()  # as tests/conftest.py does: looking for garbage among JAX's objects takes a tenth of the time
    gc.set_threshold(50_000, 20, 50)
    cases = _run(module)
    with open(results_path, "w") as file:
        json.dump(cases, file, indent=1, sort_keys=True)


def _load(path):
    spec = importlib.util.spec_from_file_location("xmap_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["xmap_test"] = module
    spec.loader.exec_module(module)
    return module


def _run(module):
    """{"Class.case": "passed", "skipped: why" or "failed: why"}"""
    outcomes = {}

    class Result(unittest.TestResult):
        def addSuccess(self, test):
            outcomes[_name(test)] = "passed"

        def addSkip(self, test, reason):
            outcomes[_name(test)] = f"skipped: {reason}"

        def addFailure(self, test, error):
            kind, message, _ = error
            outcomes[_name(test)] = f"failed: {kind.__name__}: {' '.join(str(message).split())[:1000]}"

        addError = addFailure

    unittest.defaultTestLoader.loadTestsFromModule(module).run(Result())
    return outcomes


def _name(test):
    return f"{type(test).__name__}.{test._testMethodName}" if hasattr(test, "_testMethodName") else str(test)


def _provide_deleted_internals():
    """Private modules under their old names, with what `install()` put back; nothing here is for users."""
    if "FUTURE_JAX" in os.environ:
        from tests.legacy import future_jax  # noqa: F401
    from shardformer import legacy

    legacy.install()

    public = _public_names()
    _provide_private_aliases()
    _provide_test_utilities()
    _provide_primitive_rules()
    added = {home: names - public[home] for home, names in _public_names().items() if names - public.get(home, names)}
    assert not added, f"public names that install() did not provide: {added}"


def _public_names():
    """Everything that a user can import; in jax.interpreters, the file's own primitives register their rules."""
    homes = [name for name in sys.modules if name.partition(".")[0] == "jax" and "._src" not in name]
    return {home: set(vars(sys.modules[home])) for home in homes if home != "jax.interpreters"}


def _provide_private_aliases():
    import jax
    from jax import lax
    from jax._src import core
    from jax._src.lax import parallel
    from jax.experimental import maps

    sys.modules["jax._src.maps"] = jax._src.maps = types.SimpleNamespace(**vars(maps))
    for name in ("spmd_lowering", "spmd_lowering_manual"):
        setattr(
            jax._src.maps, name.upper(), types.SimpleNamespace(value=getattr(jax.config, f"experimental_xmap_{name}"))
        )
    core.NamedShape = jax.core.NamedShape
    parallel.pgather = lax.pgather


def _provide_test_utilities():
    import jax
    import numpy as np
    from absl.testing import parameterized
    from jax._src import test_util
    from jax.sharding import Mesh

    def with_and_without_mesh(case):
        both = (("", (), ()), ("Mesh", (("x", 2),), (("i", "x"),)))
        named = [{"testcase_name": name, "mesh": mesh, "axis_resources": resources} for name, mesh, resources in both]
        return parameterized.named_parameters(named)(test_util.with_mesh_from_kwargs(case))

    def create_global_mesh(shape, axis_names):
        return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axis_names)

    expect = unittest.TestCase.assertRaisesRegex

    def assert_raises_regex(self, kind, words, *args, **kwargs):
        plain = words.replace("\\", "")
        ours = next((ours for theirs, ours in OUR_WORDS.items() if theirs in plain), words)
        return expect(self, kind, ours, *args, **kwargs)

    test_util.JaxTestCase.assertRaisesRegex = assert_raises_regex
    test_util.with_and_without_mesh = with_and_without_mesh
    test_util.create_global_mesh = create_global_mesh
    test_util.set_host_platform_device_count = contextlib.nullcontext


def _provide_primitive_rules():
    """The file's own primitives have a batching rule for the axis that their parameters name; others pass through."""
    import jax
    from jax._src import core, lax
    from jax.interpreters import batching

    class NamedRules(dict):
        def __setitem__(self, primitive, rule):
            super().__setitem__(primitive, rule)
            batching.fancy_primitive_batchers[primitive] = functools.partial(batch, primitive, rule)

    def batch(primitive, named_rule, axis, values, dims, axis_name, **parameters):
        if axis.name in (axis_name if isinstance(axis_name, tuple) else (axis_name,)):
            return named_rule(axis.size, axis.name, None, values, dims, axis_name=axis_name, **parameters)
        return primitive.bind(*values, axis_name=axis_name, **parameters), dims[0]  # the named axis is further out

    stand_in = types.ModuleType("jax.interpreters.batching")
    stand_in.axis_primitive_batchers, stand_in.primitive_batchers = NamedRules(), {}
    stand_in.not_mapped = None
    jax.interpreters.batching = stand_in
    core.raise_to_shaped = _identity
    core.axis_substitution_rules = {}
    lax.parallel._subst_all_names_in_param = print  # never called: substitution is gone


def _identity(aval):
    return aval


if __name__ == "__main__":
    main(sys.argv[1])
