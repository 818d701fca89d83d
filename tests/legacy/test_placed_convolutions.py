"""Convolutions of xmapped functions on devices, their gradients too, against one instance after the other.

XLA's partitioner splits some convolutions with groups wrongly, so these must not reach it: see shard_map_helpers.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import batching

from shardformer.legacy import xmap
from shardformer.legacy.migration import shard_map_helpers
from tests.legacy.programs.registry import mesh

CONVOLUTION = jax.lax.conv_general_dilated_p


def convolve(x, w, stride=1, padding="SAME", **how):
    return jax.lax.conv_general_dilated(x, w, (stride,), padding, dimension_numbers=("NWC", "WIO", "NWC"), **how)


# The shapes of one instance's input and kernel.
KERNELS = {
    "one position": (convolve, (6, 4, 16), (1, 16, 8)),
    "three positions": (convolve, (6, 4, 16), (3, 16, 8)),
    "full input": (functools.partial(convolve, padding="VALID"), (6, 4, 16), (4, 16, 8)),
    "stride": (functools.partial(convolve, stride=2), (6, 8, 16), (1, 16, 8)),
    "depthwise": (functools.partial(convolve, feature_group_count=16), (6, 4, 16), (1, 1, 16)),
    "groups of rows": (functools.partial(convolve, batch_group_count=2), (6, 4, 16), (3, 16, 8)),
}
# The named axes of the input and of the kernel.
MAPPED = {"input": ("i", ""), "kernel": ("", "i"), "both": ("i", "i"), "none": ("", "")}


def gradients(f):
    return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w)) ** 2), (0, 1))


def scanned(f):
    def loss(x, w):
        return jax.lax.scan(lambda sum, k: (sum + jnp.sum(jnp.sin(f(x * k, w))), None), 0.0, jnp.arange(1.0, 3.0))[0]

    return jax.grad(loss, (0, 1))


def over_kernels(f):
    """A vmap inside the body gives the convolution groups before xmap does."""
    return gradients(lambda x, w: jax.vmap(lambda k: f(x, w * k))(jnp.arange(1.0, 4.0)))


BODIES = {
    "first order": gradients,
    "second order": lambda f: jax.grad(lambda x, w: jnp.sum(gradients(f)(x, w)[1][1] ** 2), (0, 1)),
    "checkpoint": lambda f: gradients(jax.checkpoint(f)),
    "jit": lambda f: gradients(jax.jit(f)),
    "scan": scanned,
    "vmap": over_kernels,
}
# The sizes of the named axes in their order, and their mesh axes.
LAYOUTS = {
    "one a device": ({"i": 8}, {"i": "x"}, {"x": 8}),
    "several a device": ({"i": 8}, {"i": "x"}, {"x": 4}),
    "two mesh axes": ({"i": 4}, {"i": ("x", "y")}, {"x": 2, "y": 2}),
    "two axes": ({"j": 2, "i": 4}, {"i": "x", "j": "y"}, {"x": 4, "y": 2}),
    "unplaced outside": ({"j": 3, "i": 4}, {"i": "x"}, {"x": 4}),
    "unplaced inside": ({"i": 4, "j": 3}, {"i": "x"}, {"x": 4}),
}


def arguments(kernel, names, sizes):
    """Random arrays with the named axes in front, small enough that the sine of their products is well conditioned."""
    random = np.random.default_rng(0)
    shapes = KERNELS[kernel][1:]
    return [
        random.normal(scale=0.25, size=(*(sizes[name] for name in carried), *shape)).astype(np.float32)
        for carried, shape in zip(names, shapes, strict=True)
    ]


def mapped(body, layout, names, operands):
    sizes, resources, shape = LAYOUTS[layout]
    specs = [[*carried, ...] for carried in names]
    f = xmap(body, tuple(specs), [*sizes, ...], axis_sizes=sizes, axis_resources=resources)
    with mesh(**shape):
        return jax.tree.leaves(f(*operands))


def one_by_one(body, layout, names, operands):
    sizes = LAYOUTS[layout][0]
    results = []
    for index in itertools.product(*map(range, sizes.values())):
        at = dict(zip(sizes, index, strict=True))
        mine = [x[tuple(at[name] for name in carried)] for x, carried in zip(operands, names, strict=True)]
        results.append(jax.tree.leaves(jax.jit(body)(*mine)))
    stacked = map(np.stack, zip(*results, strict=True))
    return [array.reshape(*sizes.values(), *array.shape[1:]) for array in stacked]


def difference(kernel="one position", body="first order", layout="one a device", names=("i", "i")):
    """Returns the largest difference between both, relative to the scale of each array."""
    body = BODIES[body](KERNELS[kernel][0])
    operands = arguments(kernel, names, LAYOUTS[layout][0])
    pairs = zip(mapped(body, layout, names, operands), one_by_one(body, layout, names, operands), strict=True)
    return max(np.abs(got - expected).max() / np.abs(expected).max() for got, expected in pairs)


@pytest.mark.parametrize("names", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel, names):
    assert difference(kernel, layout="several a device", names=names) < 1e-5


@pytest.mark.parametrize("layout", ["one a device", "several a device"])
@pytest.mark.parametrize("body", BODIES)
def test_every_kind_of_gradient(body, layout):
    assert difference(body=body, layout=layout) < 1e-5


@pytest.mark.parametrize("names", [("ij", "ij"), ("i", "ij"), ("i", "j")], ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, names):
    names = [tuple(name for name in carried if name in LAYOUTS[layout][0]) for carried in names]
    assert difference(layout=layout, names=names) < 1e-5
    assert difference("full input", "vmap", layout, names) < 1e-5


def test_gradient_from_outside():
    """The transpose of a mapped convolution is one too."""
    x, w = arguments("one position", ("i", "i"), {"i": 8})

    @jax.custom_vjp
    def f(x, w):
        return convolve(x, w)

    f.defvjp(lambda x, w: (convolve(x, w), (x, w)), lambda xw, g: jax.vjp(convolve, *xw)[1](2 * g))

    def loss(x, w, f, resources):
        mapped = xmap(f, (["i", ...], ["i", ...]), ["i", ...], axis_resources=resources)
        return jnp.sum(jnp.sin(mapped(x, w)) ** 2)

    for function in (convolve, f):
        expected = [jax.grad(loss, (0, 1))(x, w, function, {})]
        with mesh(x=8):
            got = [jax.grad(loss, (0, 1))(x, w, function, {"i": "x"})]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_two_meshes_share_no_inner_program():
    """JAX caches what an inner jit becomes under vmap, by the names of the mesh axes among others."""
    body = gradients(jax.jit(convolve))
    names, layouts = ("i", "i"), ("one a device", "several a device")
    operands = arguments("one position", names, {"i": 8})
    first, second = (mapped(body, layout, names, operands) for layout in layouts)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_placed_axis_equals_its_name_only():
    lines = [jax.sharding.Mesh(np.array(jax.devices()[:size]), ("x",)) for size in (2, 4)]
    first, second = (shard_map_helpers.PlacedAxis("x", line) for line in lines)
    assert first == "x" == second
    assert first != second
    assert first == shard_map_helpers.PlacedAxis("x", lines[0])
    assert not any(first == other for other in ("y", None, jax.sharding.PartitionSpec.UNCONSTRAINED))


def test_sums_in_bfloat16():
    """A shard_map within a partitioned program must not stop XLA's compiler at the sums of bfloat16."""

    def body(x, w):
        return jax.tree.map(lambda g: jax.lax.psum(g, "i"), gradients(convolve)(x, w)[1])

    operands = [a.astype(jnp.bfloat16) for a in arguments("one position", ("i", "i"), {"i": 8})]
    gx, gw = mapped(lambda x, w: body(x, w), "several a device", ("i", "i"), operands)
    assert gx.dtype == gw.dtype == jnp.bfloat16


def migrated_difference():
    body = gradients(convolve)
    sizes = {"i": 8}
    operands = arguments("one position", ("i", "i"), sizes)
    spec = jax.sharding.PartitionSpec("i")
    with mesh(x=4) as line, shard_map_helpers.mesh_scope(line):
        got = shard_map_helpers.shard_map_over_mesh(body, (spec, spec), spec, axes={"i": "x"})(*operands)
    expected = one_by_one(body, "one a device", ("i", "i"), operands)
    pairs = zip(jax.tree.leaves(got), expected, strict=True)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


def test_migrated_xmap():
    assert migrated_difference() < 1e-5


def test_grouped_convolution_of_the_partitioner_is_wrong(monkeypatch):
    monkeypatch.setitem(batching.fancy_primitive_batchers, CONVOLUTION, shard_map_helpers._batch_by_groups)
    assert difference(layout="several a device") > 0.1
    assert migrated_difference() > 0.1
