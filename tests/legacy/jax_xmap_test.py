"""Runs JAX's own last `tests/xmap_test.py` (tag jax-v0.4.30) against `shardformer.legacy`; writes what each case did.

JAX_XMAP_TEST=.../xmap_test.py python tests/legacy/jax_xmap_test.py RESULTS.json

Under jax 0.4.30 it runs the file as it is: so the list of cases that passed then was recorded. Under today's JAX the
file is as it was too; what it imports from JAX's deleted internals is stood in for here, and only here.
"""

import contextlib
import functools
import importlib.util
import json
import os
import sys
import types
import unittest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

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
    cases = _run(_load(os.environ["JAX_XMAP_TEST"]))
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
    from shardformer import legacy

    legacy.install()
    _provide_maps(legacy)
    _provide_test_utilities()
    _provide_primitive_rules()
    _provide_named_shape()
    _provide_parallel_operators()


def _provide_maps(legacy):
    import jax
    from jax._src import config

    def lowering(name, value):
        config.bool_state(name=f"experimental_xmap_{name}", default=value, help="without a meaning now")
        return types.SimpleNamespace(value=value)

    maps = types.ModuleType("jax._src.maps")
    maps.xmap, maps.serial_loop, maps.SerialLoop = legacy.xmap, legacy.serial_loop, legacy.SerialLoop
    maps.SPMD_LOWERING = lowering("spmd_lowering", True)  # one program for all devices is the only way now
    maps.SPMD_LOWERING_MANUAL = lowering("spmd_lowering_manual", False)
    lowering("ensure_fixed_sharding", False)
    sys.modules["jax._src.maps"] = jax._src.maps = maps


def _provide_test_utilities():
    import jax
    import jax.ad_checkpoint
    import jax.extend.core
    import numpy as np
    from absl.testing import parameterized
    from jax._src import test_util

    def with_and_without_mesh(case):
        both = (("", (), ()), ("Mesh", (("x", 2),), (("i", "x"),)))
        named = [{"testcase_name": name, "mesh": mesh, "axis_resources": resources} for name, mesh, resources in both]
        return parameterized.named_parameters(named)(test_util.with_mesh_from_kwargs(case))

    def create_global_mesh(shape, axis_names):
        return jax.sharding.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axis_names)

    expect = unittest.TestCase.assertRaisesRegex

    def assert_raises_regex(self, kind, words, *args, **kwargs):
        plain = words.replace("\\", "")
        ours = next((ours for theirs, ours in OUR_WORDS.items() if theirs in plain), words)
        return expect(self, kind, ours, *args, **kwargs)

    test_util.JaxTestCase.assertRaisesRegex = assert_raises_regex
    test_util.with_and_without_mesh = with_and_without_mesh
    test_util.create_global_mesh = create_global_mesh
    test_util.set_host_platform_device_count = lambda count: contextlib.nullcontext()
    jax.ad_checkpoint.checkpoint = jax.checkpoint
    jax.core.jaxpr_as_fun = jax.extend.core.jaxpr_as_fun


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
    core.raise_to_shaped = lambda aval: aval
    core.axis_substitution_rules = {}
    lax.parallel._subst_all_names_in_param = print  # never called: substitution is gone


def _provide_named_shape():
    """A shape with named axes, as far as `jax.random` took it: one more draw per index along each name."""
    import jax
    from jax._src import core

    class NamedShape(tuple):
        def __new__(cls, *sizes, **named):
            shape = super().__new__(cls, sizes)
            shape.named = named
            return shape

    def takes_named_shape(sampler):
        @functools.wraps(sampler)
        def sample(key, *args, shape=(), **kwargs):
            for name, size in getattr(shape, "named", {}).items():
                actual = jax.lax.axis_size(name)
                if actual != size:
                    raise ValueError(f"The shape of axis {name} was specified as {size}, but it really is {actual}")
                key = jax.random.fold_in(key, jax.lax.axis_index(name))
            return sampler(key, *args, shape=tuple(shape), **kwargs)

        return sample

    core.NamedShape = NamedShape
    for name in ("uniform", "normal", "bernoulli", "truncated_normal"):
        setattr(jax.random, name, takes_named_shape(getattr(jax.random, name)))


def _provide_parallel_operators():
    """`pdot`, `xeinsum` and `pgather`, which JAX deleted with xmap."""
    from jax import lax
    from jax._src.lax import parallel

    for module, operator in ((lax, pdot), (lax, xeinsum), (parallel, pgather)):
        if not hasattr(module, operator.__name__):
            setattr(module, operator.__name__, operator)


def pdot(x, y, axis_name, pos_contract=((), ()), pos_batch=((), ())):
    """A dot product that contracts named axes too; its gradient is the dot product's own, without a second psum."""
    import jax

    names = tuple(axis_name) if isinstance(axis_name, (list, tuple)) else (axis_name,)

    def local(x, y):
        return jax.lax.dot_general(x, y, (pos_contract, pos_batch))

    @jax.custom_vjp
    def product(x, y):
        return jax.lax.psum(local(x, y), names)

    product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda operands, ct: jax.vjp(local, *operands)[1](ct))
    return product(x, y)


def xeinsum(spec, *operands):
    """An einsum whose operands may carry named axes in braces: 'ij{a},jk{a}->ik'."""
    import jax
    import jax.numpy as jnp

    *operand_terms, (out_letters, out_names) = map(_term, _split_terms(spec))

    def alone(position, kind, out):
        others = set(out).union(*(term[kind] for i, term in enumerate(operand_terms) if i != position))
        return tuple(name for name in operand_terms[position][kind] if name not in others)

    reduced, letters = [], []
    for position, operand in enumerate(operands):
        own_letters, _ = operand_terms[position]
        gone = alone(position, 0, out_letters)
        summed = jnp.sum(operand, tuple(own_letters.index(letter) for letter in gone))
        reduced.append(jax.lax.psum(summed, alone(position, 1, out_names)))
        letters.append("".join(letter for letter in own_letters if letter not in gone))
    if len(operands) == 1:
        return reduced[0]

    def places(shared):
        return tuple([own.index(letter) for letter in shared] for own in letters)

    both = [letter for letter in letters[0] if letter in letters[1]]
    names = tuple(set(operand_terms[0][1]) & set(operand_terms[1][1]) - set(out_names))
    contracted = [letter for letter in both if letter not in out_letters]
    return jax.lax.pdot(
        *reduced, names, places(contracted), places([letter for letter in both if letter in out_letters])
    )


def _split_terms(spec):
    """'ij{a,b},j->i' as ['ij{a,b}', 'j', 'i']"""
    operands, out = spec.split("->")
    depth, terms = 0, [""]
    for letter in operands:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            terms.append("")
        else:
            terms[-1] += letter
    return [*terms, out]


def _term(text):
    letters, _, names = text.rstrip("}").partition("{")
    return letters, tuple(names.split(",")) if names else ()


def pgather(source, indices, axes):
    """Indexes the flattened `axes` of `source`, positions or names, with `indices`."""
    import jax
    import jax.numpy as jnp

    axes = axes if isinstance(axes, (list, tuple)) else (axes,)
    positions = [axis for axis in axes if isinstance(axis, int)]
    front = jnp.moveaxis(source, positions, range(len(positions)))
    for name in (axis for axis in axes if not isinstance(axis, int)):
        front = jax.lax.all_gather(front, name)
    flat = front.reshape(-1, *front.shape[len(axes) :])
    return flat[indices]


if __name__ == "__main__":
    main(sys.argv[1])
