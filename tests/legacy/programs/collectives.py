"""Programs about collectives, named reductions and random numbers, under several layouts of their axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .registry import PROGRAMS, floats, ints, mesh, on, program, table, xmap

# Collectives: every body under three layouts of its axis -------------------------------------------------------------

LAYOUTS = {"vmapped": (8, {}, {}), "mesh": (8, {"x": 8}, {"i": "x"}), "tiled": (16, {"x": 4}, {"i": "x"})}


def laid_out(body, layout, make, axis):
    size, sizes, _ = LAYOUTS[layout]
    with on(sizes):
        return xmap(body, [axis, ...], [axis, ...], axis_resources={axis: "x"} if sizes else {})(make(size))


def family(make, layouts=tuple(LAYOUTS), axis="i", **bodies):
    for name, body in bodies.items():
        for layout in layouts:
            PROGRAMS[f"{name}_{layout}"] = functools.partial(laid_out, body, layout, make, axis)


def split(x, parts=2):
    """Groups of instances: every `parts`-th one together; the rows are as long as there are instances."""
    return [list(range(part, len(x), parts)) for part in range(parts)]


def halved(x):
    return np.arange(len(x)).reshape(2, -1).tolist()


def shift(x):
    return [(k, (k + 1) % len(x)) for k in range(len(x))]


family(
    lambda size: ints(size, size),
    psum=lambda x: lax.psum(x[:2], "i"),
    psum_tree=lambda x: lax.psum({"a": x[:1], "b": (x[1:3],)}, "i"),
    psum_of_constants=lambda x: (lax.psum(3, "i"), lax.psum(np.array([1, 2], np.int32), "i"), x[:1]),
    psum_name_in_tuple=lambda x: lax.psum(x[:2], ("i",)),
    psum_no_names=lambda x: lax.psum(x[:2], ()),
    psum_groups=lambda x: lax.psum(x[:2], "i", axis_index_groups=split(x)),
    pmax=lambda x: lax.pmax(x[:2], "i"),
    pmax_groups=lambda x: lax.pmax(x[:2], "i", axis_index_groups=halved(x)),
    pmin=lambda x: lax.pmin(x[:2], "i"),
    axis_index=lambda x: (lax.axis_index("i"), x[0]),
    all_gather=lambda x: lax.all_gather(x[:2], "i"),
    all_gather_axis_1=lambda x: lax.all_gather(x[:2], "i", axis=1),
    all_gather_concatenated=lambda x: lax.all_gather(x[:2], "i", tiled=True),
    all_gather_groups=lambda x: lax.all_gather(x[:2], "i", axis_index_groups=split(x)),
    psum_scatter=lambda x: lax.psum_scatter(x, "i"),
    psum_scatter_concatenated=lambda x: lax.psum_scatter(x, "i", tiled=True),
    psum_scatter_axis_1=lambda x: lax.psum_scatter(jnp.stack([x, 2 * x]), "i", scatter_dimension=1, tiled=True),
    psum_scatter_groups=lambda x: lax.psum_scatter(x[: len(x) // 2], "i", axis_index_groups=split(x)),
    all_to_all=lambda x: lax.all_to_all(x, "i", 0, 0),
    all_to_all_moved=lambda x: lax.all_to_all(jnp.stack([x, 2 * x], 1), "i", 0, 1),
    all_to_all_shared=lambda x: lax.all_to_all(lax.psum(x, "i"), "i", 0, 0),
    pswapaxes_shared=lambda x: lax.pswapaxes(lax.psum(jnp.stack([x, 2 * x]), "i"), "i", 1),
    all_to_all_concatenated=lambda x: lax.all_to_all(jnp.stack([x, 2 * x], 1), "i", 0, 1, tiled=True),
    ppermute=lambda x: lax.ppermute(x[:2], "i", shift(x)),
    ppermute_partial=lambda x: lax.ppermute(x[:2] + 1, "i", [(0, 5), (5, 1)]),
    pshuffle=lambda x: lax.pshuffle(x[:2], "i", list(range(len(x)))[::-1]),
    pmean=lambda x: lax.pmean(x[:2].astype(jnp.float32), "i"),
    pmax_of_negatives=lambda x: lax.pmax(-1 - x[:2].astype(jnp.float32), "i"),
)


def spread(body):
    """The program of one named axis over two mesh axes, beside a third one."""
    with mesh(x=2, y=2, z=2):
        return xmap(body, ["i", ...], ["i", ...], axis_resources={"i": ("x", "y")})(ints(4, 4))


def spread_family(**bodies):
    for name, body in bodies.items():
        PROGRAMS[f"{name}_spread"] = functools.partial(spread, body)


spread_family(
    psum_groups=lambda x: lax.psum(x[:2], "i", axis_index_groups=split(x)),
    pmax_groups=lambda x: lax.pmax(x[:2], "i", axis_index_groups=halved(x)),
    all_gather_groups=lambda x: lax.all_gather(x[:2], "i", axis_index_groups=split(x)),
    psum_scatter_groups=lambda x: lax.psum_scatter(x[: len(x) // 2], "i", axis_index_groups=split(x)),
    ppermute_partial=lambda x: lax.ppermute(x[:2] + 1, "i", [(0, 3), (3, 1)]),
    grad_psum_groups=lambda x: jax.grad(lambda v: jnp.sum(v * lax.psum(v * v, "i", axis_index_groups=split(x))))(
        x.astype(jnp.float32)
    ),
)


@program
def groups_beside_a_tiled_axis():
    body = lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]) + lax.psum(x, "j")
    with mesh(x=4, y=2):
        return xmap(body, ["i", "j"], ["j", "i"], axis_resources={"i": "x", "j": "y"})(ints(4, 4))


@program
def pshuffle_over_a_reversed_mesh():
    body = lambda x: lax.pshuffle(x, "i", [3, 0, 2, 1])
    with mesh(x=2, y=2):
        return xmap(body, ["i", ...], ["i", ...], axis_resources={"i": ("y", "x")})(ints(4, 2))


# Collectives over tuples of names ------------------------------------------------------------------------------------

GRIDS = {
    "vmapped": ((2, 4), {}),
    "mesh": ((2, 4), {"i": "x", "j": "y"}),
    "tiled": ((4, 8), {"i": "x", "j": "y"}),
    "one_mesh_axis": ((3, 4), {"j": "y"}),
}


def gridded(body, layout):
    (n, m), resources = GRIDS[layout]
    with mesh(x=2, y=4):
        return xmap(body, ["i", "j", ...], ["i", "j", ...], axis_resources=resources)(ints(n, m, n * m))


def grid_family(**bodies):
    for name, body in bodies.items():
        for layout in GRIDS:
            PROGRAMS[f"{name}_{layout}"] = functools.partial(gridded, body, layout)


grid_family(
    pair_psum=lambda x: (lax.psum(x[:1], ("i", "j")), lax.psum(x[:1], "j"), lax.psum(x[:1], "i")),
    pair_pmax_pmin=lambda x: (lax.pmax(x[:1], ("j", "i")), lax.pmin(x[:1], ("i", "j"))),
    pair_pmean=lambda x: lax.pmean(x[:2].astype(jnp.float32), ("i", "j")),
    pair_axis_index=lambda x: (lax.axis_index(("i", "j")), lax.axis_index(("j", "i"))),
    pair_all_gather=lambda x: lax.all_gather(x[:1], ("i", "j")),
    pair_all_gather_reversed=lambda x: lax.all_gather(x[:1], ("j", "i")),
    pair_psum_scatter=lambda x: lax.psum_scatter(x, ("i", "j")),
    pair_all_to_all=lambda x: lax.all_to_all(x, ("i", "j"), 0, 0),
    pair_ppermute=lambda x: lax.ppermute(x[:1], ("i", "j"), shift(x)),
)

# Named reductions ----------------------------------------------------------------------------------------------------

family(
    lambda size: floats(size, 3),
    ("vmapped", "tiled"),
    sum_in_list=lambda x: jnp.sum(x, axis=["i"]),
    sum_mixed=lambda x: jnp.sum(x, axis=("i", 0)),
    sum_method=lambda x: x.sum(["i"]),
    sum_of_ints=lambda x: jnp.sum((x * 8).astype(jnp.int32), axis=("i",)),
    mean_in_list=lambda x: jnp.mean(x, axis=["i"]),
    mean_mixed=lambda x: jnp.mean(x, axis=("i", 0)),
    max_in_list=lambda x: jnp.max(x, axis=["i"]),
    max_mixed=lambda x: jnp.max(x, axis=("i", 0)),
    min_in_list=lambda x: jnp.min(x, axis=["i"]),
    var_in_list=lambda x: jnp.var(x, axis=["i"]),
    var_mixed=lambda x: jnp.var(x, axis=("i", 0)),
    std_in_list=lambda x: jnp.std(x, axis=["i"]),
    logsumexp_in_list=lambda x: jax.nn.logsumexp(x, axis=["i"]),
    logsumexp_mixed=lambda x: jax.nn.logsumexp(x, axis=("i", 0)),
    softmax_in_list=lambda x: jax.nn.softmax(x, axis=["i"]),
    prod_in_list=lambda x: jnp.prod(x, axis=["i"]),
    any_in_list=lambda x: jnp.any(x > 1, axis=["i"]),
    all_in_list=lambda x: jnp.all(x > -1, axis=["i"]),
    sum_unknown_name=lambda x: jnp.sum(x, axis=["k"]),
)
family(
    lambda size: floats(size, 3),
    ("vmapped", "tiled"),
    "batch",
    sum_bare=lambda x: jnp.sum(x, axis="batch"),
    mean_bare=lambda x: jnp.mean(x, axis="batch"),
    min_bare=lambda x: jnp.min(x, axis="batch"),
    std_bare=lambda x: jnp.std(x, axis="batch"),
    logsumexp_bare=lambda x: jax.nn.logsumexp(x, axis="batch"),
    softmax_bare=lambda x: jax.nn.softmax(x, axis="batch"),
    max_in_tuple=lambda x: jnp.max(x, axis=("batch",)),
)

# Random numbers ------------------------------------------------------------------------------------------------------


def drawn(draw, layout, mapped):
    size, sizes, resources = LAYOUTS[layout]
    key = jax.random.PRNGKey(3)
    keys, spec = (jax.random.split(key, size), ["i", ...]) if mapped else (key, {})
    with on(sizes):
        return xmap(draw, spec, ["i", ...], axis_sizes={"i": size}, axis_resources=resources)(keys)


for layout in LAYOUTS:
    table(
        **{
            f"random_uniform_mapped_key_{layout}": functools.partial(
                drawn, lambda key: jax.random.uniform(key, (2, 3)), layout, True
            ),
            f"random_uniform_same_key_{layout}": functools.partial(
                drawn, lambda key: jax.random.uniform(key, (3,)), layout, False
            ),
            f"random_bits_and_split_{layout}": functools.partial(
                drawn, lambda key: (jax.random.split(key, 3), jax.random.randint(key, (2,), 0, 99)), layout, True
            ),
            f"random_fold_in_index_{layout}": functools.partial(
                drawn, lambda key: jax.random.fold_in(key, lax.axis_index("i")), layout, False
            ),
        }
    )

table(
    random_normal_mapped_key=lambda: drawn(lambda key: jax.random.normal(key, (3,)), "mesh", True),
    random_bernoulli_same_key=lambda: drawn(lambda key: jax.random.bernoulli(key, 0.5, (9,)), "tiled", False),
    random_categorical_mapped_key=lambda: drawn(lambda key: jax.random.categorical(key, floats(5)), "tiled", True),
    random_permutation_mapped_key=lambda: drawn(lambda key: jax.random.permutation(key, 5), "vmapped", True),
)
