"""Small xmap programs over everything that LEGACY.md lists; the same lines run on jax 0.4.13, 0.4.30 and on today's.

A program takes nothing and returns a pytree of arrays, or raises. Families repeat a body over layouts of its axes.
"""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def table(**functions):
    PROGRAMS.update(functions)


def maps():
    from jax.experimental import maps

    return maps


def xmap(*arguments, **keywords):
    return maps().xmap(*arguments, **keywords)


def mesh(**sizes):
    shape = tuple(sizes.values())
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), tuple(sizes))


def within(context, function):
    with context:
        return function()


def on(sizes):
    return mesh(**sizes) if sizes else contextlib.nullcontext()


def ints(*shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def floats(*shape):
    return ((np.arange(np.prod(shape)) * 37 % 17 - 7) / 8).astype(np.float32).reshape(shape)


def twice(x):
    return x + x


def plus(x, y):
    return x + y


def rows(body, *arguments, out=("i", ...), **keywords):
    """The body over the leading axis of all arguments, named i."""
    return xmap(body, ["i", ...], list(out), **keywords)(*arguments)


# Specs of the inputs -------------------------------------------------------------------------------------------------

table(
    spec_list_ellipsis=lambda: xmap(twice, ["i", ...], ["i", ...])(ints(2, 3)),
    spec_list_whole_rank=lambda: xmap(twice, ["i", None], ["i", None])(ints(2, 3)),
    spec_list_rank_too_small=lambda: xmap(twice, ["i"], ["i", ...])(ints(2, 3)),
    spec_list_rank_too_large=lambda: xmap(twice, ["i", None, None], ["i", ...])(ints(2, 3)),
    spec_none_first=lambda: xmap(twice, [None, "i", ...], ["i", ...])(ints(2, 3)),
    spec_two_names=lambda: xmap(twice, ["i", "j", ...], ["j", "i", ...])(ints(2, 3, 4)),
    spec_ellipsis_only=lambda: xmap(twice, [...], [...])(ints(2, 3)),
    spec_ellipsis_first=lambda: xmap(twice, [..., "i"], ["i", ...])(ints(2, 3)),
    spec_ellipsis_middle=lambda: xmap(twice, ["i", ..., "j"], ["i", "j"])(ints(2, 3)),
    spec_empty_dict=lambda: xmap(twice, {}, {})(ints(2, 3)),
    spec_empty_list=lambda: xmap(twice, [], [])(ints()),
    spec_empty_list_rank_1=lambda: xmap(twice, [], [...])(ints(3)),
    spec_dict=lambda: xmap(twice, {1: "i"}, {0: "i"})(ints(2, 3)),
    spec_dict_two_names=lambda: xmap(twice, {1: "i", 0: "j"}, {0: "i", 1: "j"})(ints(2, 3, 4)),
    spec_dict_beyond_rank=lambda: xmap(twice, {2: "i"}, {0: "i"})(ints(2, 3)),
    spec_negative=lambda: xmap(twice, {-1: "i"}, {0: "i"})(ints(2, 3)),
    spec_duplicate_in_list=lambda: xmap(twice, ["i", "i"], ["i", ...])(ints(2, 2)),
    spec_duplicate_in_dict=lambda: xmap(twice, {0: "i", 1: "i"}, ["i", ...])(ints(2, 2)),
    spec_bare_string=lambda: xmap(twice, "i", ["i", ...])(ints(2, 3)),
    spec_bare_string_in_tuple=lambda: xmap(plus, (["i", ...], "i"), ["i", ...])(ints(2, 3), ints(2, 3)),
    spec_tuple=lambda: xmap(twice, ("i", ...), ("i", ...))(ints(2, 3)),
    spec_mixed_dict=lambda: xmap(twice, {0: "i", "a": "j"}, ["i", ...])(ints(2, 3)),
    spec_name_is_int=lambda: xmap(twice, {0: 7}, {1: 7})(ints(2, 3)),
    spec_name_is_tuple=lambda: xmap(twice, {0: ("a", 1)}, {1: ("a", 1)})(ints(2, 3)),
    spec_name_is_frozenset=lambda: xmap(twice, [frozenset("a"), ...], {1: frozenset("a")})(ints(2, 3)),
    spec_name_is_object=lambda: (lambda name: xmap(twice, [name, ...], {1: name})(ints(2, 3)))(object()),
    spec_same_name_elsewhere=lambda: xmap(plus, (["i", ...], {1: "i"}), ["i", ...])(ints(3, 2), ints(2, 3)),
    spec_outer_product=lambda: xmap(lambda x, y: x * y, (["i"], ["j"]), ["i", "j"])(ints(3), ints(4)),
    spec_matmul=lambda: xmap(jnp.vdot, ({0: "left"}, {1: "right"}), ["left", "right", ...])(ints(2, 5), ints(5, 3)),
    spec_empty_rows=lambda: xmap(twice, ["i", ...], ["i", ...])(ints(3, 0)),
    spec_size_zero=lambda: xmap(twice, ["i", ...], ["i", ...])(ints(0, 3)),
    spec_size_one=lambda: xmap(lambda x: lax.psum(x, "i"), ["i", ...], [...])(ints(1, 3)),
    spec_not_callable=lambda: xmap(3, ["i", ...], ["i", ...])(ints(2)),
    dtypes_kept=lambda: {
        name: rows(lambda x: lax.pmax(x, "i"), ints(2, 3).astype(name))
        for name in ["int8", "uint8", "int16", "uint32", "float16", "bfloat16", "float32"]
    },
    bool_and_complex_kept=lambda: rows(lambda x: (x > 1, lax.complex(x, -x)), floats(2, 3)),
)

# Prefixes and pytrees ------------------------------------------------------------------------------------------------

WEIGHTS = {"w": ints(2, 3), "b": (ints(2), {"c": ints(2, 1)})}

table(
    prefix_one_spec_all_arguments=lambda: xmap(plus, ["i", ...], ["i", ...])(ints(2, 3), ints(2, 3)),
    prefix_tuple=lambda: xmap(plus, (["i", ...], {}), ["i", ...])(ints(2, 3), ints(3)),
    prefix_list_of_specs=lambda: xmap(plus, [["i", ...], {}], ["i", ...])(ints(2, 3), ints(3)),
    prefix_subtree=lambda: xmap(lambda p, x: (p, x), (["i", ...], {}), (["i", ...], {}))(WEIGHTS, ints(3)),
    prefix_dict_pytree=lambda: xmap(lambda p: p, ({"w": {1: "i"}, "b": {}},), {"w": ["i", ...], "b": {}})(
        {"w": ints(2, 3), "b": (ints(2), {"c": ints(2, 1)})}
    ),
    prefix_list_argument=lambda: xmap(lambda x: x[0] + x[1], ([["i", ...], [...]],), ["i", ...])([ints(2, 3), ints(3)]),
    prefix_too_many_specs=lambda: xmap(twice, (["i", ...], ["i", ...]), ["i", ...])(ints(2, 3)),
    prefix_too_few_specs=lambda: xmap(plus, (["i", ...],), ["i", ...])(ints(2, 3), ints(2, 3)),
    prefix_wrong_key=lambda: xmap(lambda p: p["w"], ({"v": ["i", ...]},), ["i", ...])({"w": ints(2, 3)}),
    prefix_spec_too_deep=lambda: xmap(twice, ({"w": ["i", ...]},), ["i", ...])(ints(2, 3)),
    none_as_argument=lambda: xmap(lambda x, _: x, (["i", ...], None), ["i", ...])(ints(2, 3), None),
    none_under_a_spec=lambda: xmap(lambda x, _: x, (["i", ...], ["i", ...]), ["i", ...])(ints(2, 3), None),
    none_as_spec_of_array=lambda: xmap(plus, (["i", ...], None), ["i", ...])(ints(2, 3), ints(3)),
    none_as_result=lambda: xmap(lambda x: (x, None), ["i", ...], (["i", ...], None))(ints(2, 3))[0],
    none_only=lambda: xmap(twice, None, ["i", ...])(ints(2, 3)),
    keyword_argument=lambda: xmap(twice, ["i", ...], ["i", ...])(x=ints(2, 3)),
    scalar_unmapped=lambda: xmap(lambda x, s: x * s, (["i", ...], {}), ["i", ...])(ints(2, 3), 3),
    scalar_unmapped_ellipsis=lambda: xmap(lambda x, s: x * s, (["i", ...], [...]), ["i", ...])(ints(2, 3), 3),
    scalar_mapped=lambda: xmap(lambda x, s: x * s, (["i", ...], ["i", ...]), ["i", ...])(ints(2, 3), 3),
    no_arguments=lambda: xmap(lambda: lax.axis_index("i"), (), ["i"], axis_sizes={"i": 4})(),
    nested_list_specs=lambda: xmap(lambda x: x, ([["i", ...], {"a": {1: "i"}}],), [["i", ...], {"a": ["i", ...]}])(
        [ints(2, 3), {"a": ints(3, 2)}]
    ),
)

# Outputs -------------------------------------------------------------------------------------------------------------


def halves(x):
    return x[:1], x[1:]


def half_tree(x):
    return {"a": x[:1], "b": lax.psum(x, "i")}


def on_mesh(function):
    with mesh(x=4):
        return function()


BY_MESH = {"axis_resources": {"i": "x"}}

table(
    out_rank_whole=lambda: xmap(twice, ["i", ...], ["i", None])(ints(2, 3)),
    out_rank_wrong=lambda: xmap(twice, ["i", ...], ["i"])(ints(2, 3)),
    out_none_first=lambda: xmap(twice, ["i", ...], [None, "i"])(ints(2, 3)),
    out_dict_last=lambda: xmap(twice, ["i", ...], {1: "i"})(ints(2, 3)),
    out_final_positions=lambda: xmap(twice, ["i", "j", ...], {1: "i", 3: "j"})(ints(2, 5, 3, 4)),
    out_final_positions_swapped=lambda: xmap(twice, ["i", "j", ...], {0: "j", 2: "i"})(ints(2, 5, 3)),
    out_beyond_rank=lambda: xmap(twice, ["i", ...], {5: "i"})(ints(2, 3)),
    out_negative=lambda: xmap(twice, ["i", ...], {-1: "i"})(ints(2, 3)),
    out_duplicate=lambda: xmap(twice, ["i", ...], ["i", "i"])(ints(2)),
    out_unknown_name=lambda: xmap(twice, ["i", ...], ["j", ...])(ints(2, 3)),
    out_bare_string=lambda: xmap(twice, ["i", ...], "i")(ints(2, 3)),
    out_empty=lambda: xmap(lambda x: (), ["i", ...], ())(ints(2, 3)),
    out_none_names_nothing=lambda: xmap(lambda x: lax.psum(x, "i"), ["i", ...], [...])(ints(2, 3)),
    out_prefix_of_tuple=lambda: xmap(halves, ["i", ...], ["i", ...])(ints(2, 3)),
    out_prefix_of_dict=lambda: xmap(half_tree, ["i", ...], ["i", ...])(ints(2, 3)),
    out_tuple=lambda: xmap(halves, ["i", ...], (["i", ...], {1: "i"}))(ints(2, 3)),
    out_dict=lambda: xmap(half_tree, ["i", ...], {"a": ["i", ...], "b": [...]})(ints(2, 3)),
    out_list_for_tuple=lambda: xmap(halves, ["i", ...], [["i", ...], {1: "i"}])(ints(2, 3)),
    out_list_for_list=lambda: xmap(lambda x: list(halves(x)), ["i", ...], [["i", ...], {1: "i"}])(ints(2, 3)),
    out_tuple_for_list=lambda: xmap(lambda x: list(halves(x)), ["i", ...], (["i", ...], {1: "i"}))(ints(2, 3)),
    out_wrong_structure=lambda: xmap(halves, ["i", ...], (["i", ...],))(ints(2, 3)),
    out_constant_is_broadcast=lambda: rows(lambda x: (x, np.array(0)), ints(2, 3)),
    out_python_scalar=lambda: rows(lambda x: 3, ints(2, 3)),
    out_unmapped_is_broadcast=lambda: xmap(lambda x, y: y, (["i", ...], {}), {1: "i"})(ints(2, 3), ints(4)),
    out_reduced_is_broadcast=lambda: rows(lambda x: lax.psum(x, "i"), ints(2, 3)),
    out_broadcast_on_mesh=lambda: on_mesh(lambda: rows(lambda x: (x, np.array(0)), ints(8, 3), **BY_MESH)),
    out_omitted_vmapped=lambda: rows(twice, ints(4, 3), out=[...]),
    out_omitted_on_mesh=lambda: on_mesh(lambda: rows(twice, ints(4, 3) + 1, out=[...], **BY_MESH)),
    out_omitted_tiled=lambda: on_mesh(lambda: rows(twice, ints(8, 3) + 1, out=[...], **BY_MESH)),
    out_omitted_of_two=lambda: xmap(plus, (["i"], ["j"]), ["i"])(ints(2), ints(3) + 5),
    out_omitted_reduced_on_mesh=lambda: on_mesh(
        lambda: rows(lambda x: lax.psum(x, "i"), ints(8, 3), out=[...], **BY_MESH)
    ),
)

# Sizes ---------------------------------------------------------------------------------------------------------------

SUM = lambda x: lax.psum(x, "i")
SIZE = lambda x: (x, lax.psum(1, "i"))

table(
    size_given=lambda: xmap(lambda x: x + lax.axis_index("i"), {}, ["i", ...], axis_sizes={"i": 4})(ints(3)),
    size_given_and_inferred=lambda: rows(SUM, ints(4, 3), axis_sizes={"i": 4}),
    size_given_wrong=lambda: rows(SUM, ints(4, 3), axis_sizes={"i": 5}),
    size_given_unused=lambda: rows(twice, ints(2, 3), axis_sizes={"j": 5}),
    size_given_unused_summed=lambda: rows(lambda x: lax.psum(x, "j"), ints(2, 3), axis_sizes={"j": 5}),
    size_mismatch=lambda: rows(plus, ints(2, 3), ints(3, 3)),
    size_of_scalar=lambda: rows(twice, ints()),
    size_unknown_axis_in_body=lambda: rows(lambda x: lax.psum(x, "k"), ints(2, 3)),
    size_not_divisible=lambda: on_mesh(lambda: rows(SUM, ints(6, 3), **BY_MESH)),
    size_smaller_than_mesh=lambda: on_mesh(lambda: rows(SUM, ints(2, 3), **BY_MESH)),
    size_given_not_divisible=lambda: on_mesh(
        lambda: xmap(lambda: lax.axis_index("i"), (), ["i"], axis_sizes={"i": 6}, **BY_MESH)()
    ),
    size_given_on_mesh=lambda: on_mesh(
        lambda: xmap(lambda: lax.axis_index("i"), (), ["i"], axis_sizes={"i": 8}, **BY_MESH)()
    ),
    size_static_in_body=lambda: on_mesh(
        lambda: rows(lambda x: jnp.zeros(lax.psum(1, "i"), jnp.int32) + x, ints(8), **BY_MESH)
    ),
)

# Resources -----------------------------------------------------------------------------------------------------------


def placed(size, resources, body=None, sizes=(4, 2)):
    """psum, axis_index and a row of the input under the given resources of one axis, on a mesh (x, y)."""
    body = body or (lambda x: (SUM(x), lax.axis_index("i"), x))
    with mesh(x=sizes[0], y=sizes[1]):
        return rows(body, ints(size, 2), axis_resources={"i": resources})


def crossed(resources, sizes=(4, 2)):
    body = lambda x, y: (lax.psum(x * y, "i"), lax.pmax(x + y, ("i", "j")), lax.axis_index("i"), lax.axis_index("j"))
    with mesh(x=4, y=2):
        return xmap(body, ({0: "i"}, {1: "j"}), ["i", "j", ...], axis_resources=resources)(
            ints(sizes[0], 3), ints(3, sizes[1])
        )


table(
    resource_single=lambda: placed(4, "x"),
    resource_single_tiled=lambda: placed(16, "x"),
    resource_pair=lambda: placed(8, ("x", "y")),
    resource_pair_reversed=lambda: placed(8, ("y", "x")),
    resource_pair_tiled=lambda: placed(16, ("x", "y")),
    resource_pair_reversed_tiled=lambda: placed(16, ("y", "x")),
    resource_none=lambda: placed(3, ()),
    resource_one_tuple=lambda: placed(4, ("x",)),
    resource_twice_the_same=lambda: placed(16, ("x", "x")),
    resource_as_list=lambda: placed(8, ["x", "y"]),
    resource_missing=lambda: placed(4, "z"),
    resource_mesh_of_one=lambda: placed(6, "x", sizes=(1, 1)),
    resource_physical_name_in_body=lambda: placed(4, "x", lambda x: lax.psum(x, "x")),
    resource_two_axes=lambda: crossed({"i": "x", "j": "y"}),
    resource_two_axes_crossed=lambda: crossed({"i": "y", "j": "x"}, (2, 4)),
    resource_two_axes_tiled=lambda: crossed({"i": "x", "j": "y"}, (8, 4)),
    resource_two_axes_one_placed=lambda: crossed({"j": "x"}, (3, 4)),
    resource_two_axes_on_one=lambda: crossed({"i": "x", "j": "x"}, (4, 4)),
    resource_unknown_axis=lambda: crossed({"k": "x"}),
    resource_without_mesh=lambda: rows(twice, ints(4, 3), **BY_MESH),
    resource_same_name_as_axis=lambda: on_mesh(
        lambda: xmap(lambda x: lax.psum(x, "x"), ["x", ...], [...], axis_resources={"x": "x"})(ints(8, 3))
    ),
    resource_reversed_devices=lambda: within(
        Mesh(np.array(jax.devices()[3::-1]), ("x",)), lambda: rows(lambda x: (SUM(x), x), ints(8, 3), **BY_MESH)
    ),
)

# Mesh contexts -------------------------------------------------------------------------------------------------------


def environment_shape():
    return {str(name): np.int32(size) for name, size in maps().thread_resources.env.shape.items()}


@program
def mesh_environment_shapes():
    outside = environment_shape()
    with mesh(x=4, y=2):
        inside = environment_shape()
        with mesh(z=2):
            nested = environment_shape()
        restored = environment_shape()
    return outside, inside, nested, restored, environment_shape()


@program
def mesh_restored_after_error():
    try:
        with mesh(x=4):
            raise KeyError
    except KeyError:
        return environment_shape()


@program
def mesh_looked_up_at_call():
    function = xmap(lambda x: (SUM(x), x), ["i", ...], ["i", ...], **BY_MESH)
    with mesh(x=2):
        first = function(ints(8, 3))
    with mesh(y=2, x=4):
        return first, function(ints(8, 3))


@program
def mesh_left_before_call():
    with mesh(x=4):
        function = xmap(twice, ["i", ...], ["i", ...], **BY_MESH)
    return function(ints(4, 3))


@program
def mesh_nested_hides_the_outer():
    with mesh(x=4), mesh(y=2):
        return rows(twice, ints(4, 3), **BY_MESH)


@program
def mesh_as_decorator():
    @mesh(x=4)
    def function(x):
        return rows(lambda x: (SUM(x), x), x, **BY_MESH), environment_shape()

    return function(ints(8, 3)), environment_shape()


@program
def mesh_assigned_to_environment():
    resources, found = maps().thread_resources, maps().thread_resources.env
    resources.env = maps().ResourceEnv(mesh(x=4, y=2), ())
    try:
        return rows(lambda x: (SUM(x), x), ints(8, 3), **BY_MESH), environment_shape()
    finally:
        resources.env = found


@program
def mesh_assigned_with_one_argument():
    resources, found = maps().thread_resources, maps().thread_resources.env
    resources.env = maps().ResourceEnv(mesh(x=4, y=2))
    try:
        return environment_shape()
    finally:
        resources.env = found


@program
def mesh_is_thread_local():
    shapes = []
    with mesh(x=4):
        thread = threading.Thread(target=lambda: shapes.append(environment_shape()))
        thread.start()
        thread.join()
    return shapes


@program
def mesh_physical_mesh():
    empty = maps().thread_resources.env.physical_mesh.empty
    with mesh(x=4, y=2):
        found = maps().thread_resources.env.physical_mesh
        return np.bool_(empty), np.bool_(found.empty), np.array(found.devices.shape, np.int32)


table(
    mesh_from_maps=lambda: within(
        maps().mesh(np.array(jax.devices()[:4]), ("x",)), lambda: rows(SUM, ints(8, 3), **BY_MESH)
    ),
    mesh_class_from_maps=lambda: within(
        maps().Mesh(np.array(jax.devices()[:4]), ("x",)), lambda: rows(SUM, ints(8, 3), **BY_MESH)
    ),
)

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
    all_to_all_concatenated=lambda x: lax.all_to_all(jnp.stack([x, 2 * x], 1), "i", 0, 1, tiled=True),
    ppermute=lambda x: lax.ppermute(x[:2], "i", shift(x)),
    ppermute_partial=lambda x: lax.ppermute(x[:2] + 1, "i", [(0, 5), (5, 1)]),
    pshuffle=lambda x: lax.pshuffle(x[:2], "i", list(range(len(x)))[::-1]),
    pmean=lambda x: lax.pmean(x[:2].astype(jnp.float32), "i"),
)

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

# Autodiff inside the body --------------------------------------------------------------------------------------------


@jax.custom_vjp
def f_psum(x):
    return x


f_psum.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "i"),))


@jax.custom_vjp
def g_psum(x):
    return lax.psum(x, "i")


g_psum.defvjp(lambda x: (lax.psum(x, "i"), None), lambda _, g: (g,))


@jax.custom_vjp
def scaled(x):
    return x * x


scaled.defvjp(lambda x: (x * x, x), lambda x, g: (g * x * 8,))


def weight():
    """A weight for every instance, so that no two of them have the same gradient."""
    return (lax.axis_index("i") + 1).astype(jnp.float32)


def scan_of_psums(x):
    step = lambda carry, _: (carry / 8 + lax.psum(carry * x, "i") / 16, jnp.sum(carry))
    carry, sums = lax.scan(step, x, None, length=3)
    return jnp.sum(carry) + jnp.sum(sums)


def while_of_psums(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] / 8 + lax.pmean(s[1], "i")), (0, x))


def cond_of_index(x):
    return lax.cond(lax.axis_index("i") % 2 == 0, lambda x: jnp.sum(x * x), lambda x: 3 * jnp.sum(x), x)


def megatron_layer(x):
    hidden = f_psum(x) * weight() / 8
    return jnp.sum(g_psum(hidden * hidden) + x)


@functools.partial(jax.checkpoint, prevent_cse=False)
def rematerialized(x):
    return jnp.sum(lax.psum(x * x * weight() / 8, "i") * x)


family(
    lambda size: floats(size, 3),
    grad_local=jax.grad(lambda x: jnp.sum(x * x)),
    grad_psum=jax.grad(lambda x: jnp.sum(lax.psum(x, "i") * x * weight())),
    grad_psum_alone=jax.grad(lambda x: jnp.sum(lax.psum(x, "i"))),
    grad_pmean=jax.grad(lambda x: jnp.sum(lax.pmean(x * x, "i")) * weight()),
    grad_named_sum=jax.grad(lambda x: jnp.sum(x * x, axis=("i", 0)) * weight()),
    grad_named_mean=jax.grad(lambda x: jnp.mean(x * x, axis=("i", 0)) * weight()),
    grad_all_gather=jax.grad(lambda x: jnp.sum(lax.all_gather(x, "i") * weight())),
    grad_all_gather_concatenated=jax.grad(lambda x: jnp.sum(lax.all_gather(x * x, "i", tiled=True)[2:9]) * weight()),
    grad_ppermute=jax.grad(lambda x: jnp.sum(x * lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 5), (5, 0)])) * weight()),
    grad_custom_vjp=jax.grad(lambda x: jnp.sum(scaled(x) * lax.psum(x, "i"))),
    grad_f=jax.grad(lambda x: jnp.sum(f_psum(x) * weight())),
    grad_g=jax.grad(lambda x: jnp.sum(g_psum(x * weight()))),
    grad_f_and_g=jax.grad(megatron_layer),
    grad_remat=jax.value_and_grad(rematerialized),
    grad_scan=jax.grad(scan_of_psums),
    grad_cond=jax.grad(cond_of_index),
    while_loop=lambda x: while_of_psums(x)[1],
    jvp_psum=lambda x: jax.jvp(lambda x: lax.psum(x * x, "i"), (x,), (x * 2,)),
    vjp_psum=lambda x: jax.vjp(lambda x: lax.psum(x * weight(), "i"), x)[1](x),
    grad_of_argument=lambda x: jax.grad(lambda w: jnp.sum(lax.psum(x * w, "i") ** 2))(jnp.float32(2)),
)
family(
    lambda size: floats(size, size),
    grad_psum_scatter=jax.grad(lambda x: lax.psum_scatter(x * x, "i") * weight()),
    grad_psum_scatter_concatenated=jax.grad(lambda x: lax.psum_scatter(x * x, "i", tiled=True)[0] * weight()),
    grad_all_to_all=jax.grad(lambda x: jnp.sum(lax.all_to_all(x * x, "i", 0, 0) * x) * weight()),
)
family(
    lambda size: floats(size, 2),
    ("vmapped", "tiled"),
    hessian_inside=jax.hessian(lambda x: jnp.sum(lax.psum(x * x, "i") * x)),
    jacobians_inside=lambda x: (jax.jacfwd(lambda x: lax.pmean(x, "i") * x)(x), jax.jacrev(lambda x: x * x)(x)),
    vmap_inside=lambda x: jax.vmap(lambda y: lax.psum(y, "i") + y)(jnp.stack([x, 2 * x])),
    jit_inside=lambda x: jax.jit(lambda y: lax.psum(y, "i") + y)(x),
    scan_inside=lambda x: lax.scan(lambda c, y: (c + lax.psum(y, "i"), c * y), jnp.zeros_like(x), jnp.stack([x, -x])),
    fori_inside=lambda x: lax.fori_loop(0, 3, lambda k, c: c / 2 + lax.pmean(c, "i"), x),
    cond_of_psum=lambda x: lax.cond(lax.psum(x, "i")[0] > 0, lambda x: lax.pmax(x, "i"), lambda x: -x, x),
    cond_divergent=lambda x: lax.cond(lax.axis_index("i") % 2 == 0, lambda x: lax.psum(x, "i"), lambda x: -x, x),
    switch_inside=lambda x: lax.switch(lax.axis_index("i") % 3, [lambda x: x, lambda x: -x, lambda x: x * 2], x),
    sort_inside=lambda x: (jnp.sort(x), jnp.argmax(x), jnp.cumsum(x)),
    dot_inside=lambda x: jnp.einsum("a,b->ab", x, lax.pmax(x, "i")),
    where_inside=lambda x: jnp.where(lax.axis_index("i") == 2, x, 0.0),
)

# Derivatives taken from outside --------------------------------------------------------------------------------------


def outside(body, layout, derive=jax.grad, out=("i", ...)):
    def loss(x):
        size = len(x)
        weights = (1 + np.arange(size, dtype=np.float32)) / 4
        result = rows(body, x, out=out, axis_resources=LAYOUTS[layout][2])
        return jnp.sum(result.reshape((size if "i" in out else 1, -1)).sum(1) * weights[: size if "i" in out else 1])

    sizes = LAYOUTS[layout][1]
    with on(sizes):
        return derive(loss)(floats(LAYOUTS[layout][0], 3))


OUTSIDE = {
    "local": lambda x: jnp.sin(x) * x,
    "psum": lambda x: lax.psum(x * x, "i"),
    "pmean": lambda x: lax.pmean(x * x, "i"),
    "all_gather": lambda x: lax.all_gather(x * x, "i"),
    "ppermute": lambda x: lax.ppermute(x * x, "i", [(0, 1), (1, 2), (2, 5)]),
    "custom_vjp": scaled,
    "grad_inside": jax.grad(lambda x: jnp.sum(x**3)),
    "remat": rematerialized,
}

for name, body in OUTSIDE.items():
    for layout in LAYOUTS:
        PROGRAMS[f"outside_{name}_{layout}"] = functools.partial(outside, body, layout)

for layout in LAYOUTS:
    reduced = functools.partial(outside, OUTSIDE["psum"], layout, out=[...])
    PROGRAMS[f"outside_reduced_{layout}"] = reduced


def tangents(loss):
    return lambda x: jax.jvp(loss, (x,), (x * 2,))


def shared_weight(layout):
    """The gradient of an argument that is the same for every instance."""
    size, sizes, resources = LAYOUTS[layout]
    body = xmap(lambda w, x: jnp.tanh(x * w), ({}, ["i", ...]), ["i", ...], axis_resources=resources)
    with on(sizes):
        return jax.grad(lambda w: jnp.sum(body(w, floats(size, 3))))(floats(3))


table(
    outside_unmapped_weight_vmapped=lambda: shared_weight("vmapped"),
    outside_unmapped_weight_mesh=lambda: shared_weight("mesh"),
    outside_unmapped_weight_tiled=lambda: shared_weight("tiled"),
    outside_psum_56=lambda: jax.grad(lambda x: xmap(lambda x: lax.psum(x * x, "i"), ["i"], [])(x) * 4)(
        np.arange(8, dtype=np.float32)
    ),
    outside_jvp_local=lambda: outside(OUTSIDE["local"], "mesh", tangents),
    outside_jvp_psum=lambda: outside(OUTSIDE["psum"], "tiled", tangents),
    outside_value_and_grad=lambda: outside(OUTSIDE["local"], "tiled", jax.value_and_grad),
    outside_hessian=lambda: outside(lambda x: x**3, "vmapped", jax.hessian),
)

# Transforms of xmap and xmap within xmap -----------------------------------------------------------------------------


def summed(spec=("i", ...), out=("i", ...), **keywords):
    return xmap(lambda x: lax.psum(x, "i") + x, list(spec), list(out), **keywords)


@program
def transform_lower_and_compile():
    with mesh(x=4):
        return summed(**BY_MESH).lower(ints(8, 3)).compile()(ints(8, 3))


@program
def transform_eval_shape():
    with mesh(x=4):
        shape = jax.eval_shape(summed(**BY_MESH), jax.ShapeDtypeStruct((8, 3), jnp.float32))
    return np.zeros(shape.shape, shape.dtype)


@program
def transform_make_jaxpr():
    with mesh(x=4):
        result = jax.make_jaxpr(summed(**BY_MESH))(ints(8, 3)).out_avals[0]
    return np.zeros(result.shape, result.dtype)


@program
def transform_linearize():
    value, push = jax.linearize(xmap(lambda x: x * x, ["i", ...], ["i", ...]), floats(4, 3))
    return value, push(floats(4, 3))


def nest(inner_body, inner_spec=("j", ...), outer=None, inner=None, argument=None):
    with mesh(x=4, y=2):
        inner_map = xmap(inner_body, list(inner_spec), list(inner_spec), axis_resources=inner or {})
        return xmap(inner_map, ["i", ...], ["i", ...], axis_resources=outer or {})(
            ints(4, 2, 3) if argument is None else argument
        )


def jitted(function, *arguments, **sizes):
    with on(sizes):
        return jax.jit(function)(*arguments)


def jitted_step(x):
    return x - jax.grad(lambda x: jnp.sum(xmap(lambda x: x**3, ["i", ...], ["i", ...], **BY_MESH)(x)))(x) / 8


class Scale:
    """A function that is an object, with a method; equal to others, and so without a hash."""

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return isinstance(other, Scale)

    def __call__(self, x):
        return x * self.by

    def summed(self, x):
        return lax.psum(x * self.by, "i")


@program
def function_changes_its_dtype():
    function = xmap(lambda x: x / 2 if x.dtype == jnp.float32 else x + 1, ["i", ...], ["i", ...])
    return function(ints(4, 2)), function(floats(4, 2)), function(ints(4, 2))


@program
def function_of_the_same_name():
    return [xmap(lambda x, by=by: x * by, ["i", ...], ["i", ...])(ints(4, 2)) for by in range(3)]


BOTH = lambda x: lax.psum(x, ("i", "j")) + lax.psum(x, "j") + x

table(
    transform_vmap=lambda: jax.vmap(summed())(ints(2, 4, 3)),
    transform_vmap_axis_1=lambda: jax.vmap(summed(), in_axes=1, out_axes=2)(ints(4, 2, 3)),
    transform_vmap_of_mesh=lambda: on_mesh(lambda: jax.vmap(summed(**BY_MESH))(ints(2, 8, 3))),
    transform_vmap_unmapped_argument=lambda: jax.vmap(
        xmap(plus, (["i", ...], ["i", ...]), ["i", ...]), in_axes=(0, None)
    )(ints(2, 4, 3), ints(4, 3)),
    transform_vmap_named_axis=lambda: jax.vmap(
        xmap(lambda x: lax.psum(x, ("i", "k")), ["i", ...], [...]), axis_name="k"
    )(ints(2, 4, 3)),
    transform_jvp=lambda: jax.jvp(xmap(lambda x: x * x, ["i", ...], ["i", ...]), (floats(4, 3),), (floats(4, 3),)),
    transform_vjp=lambda: jax.vjp(xmap(lambda x: x * x, ["i", ...], {1: "i"}), floats(4, 3))[1](floats(3, 4)),
    transform_jit_vmapped=lambda: jitted(summed(), ints(4, 3)),
    transform_jit_mesh=lambda: jitted(summed(**BY_MESH), ints(4, 3), x=4),
    transform_jit_tiled=lambda: jitted(summed(**BY_MESH), ints(16, 3), x=4),
    transform_jit_unused_axis=lambda: jitted(summed(**BY_MESH), ints(4, 3), x=4, y=2),
    transform_jit_part_of_jit=lambda: jitted(lambda x: summed(**BY_MESH)(x + 1) * 2, ints(8, 3), x=4),
    transform_jit_index=lambda: jitted(
        xmap(lambda: lax.axis_index("i"), (), ["i"], axis_sizes={"i": 16}, **BY_MESH), x=4
    ),
    transform_jit_grad=lambda: jitted(jitted_step, floats(8, 3), x=4),
    transform_scan_over_xmap=lambda: lax.scan(lambda c, _: (summed()(c), None), ints(8, 3), None, length=2)[0],
    transform_of_jit=lambda: rows(jax.jit(twice), ints(4, 3)),
    function_bound_method=lambda: rows(Scale(3).summed, ints(4, 3)),
    function_object=lambda: (rows(Scale(3), ints(4, 3)), rows(Scale(4), ints(4, 3))),
    function_partial=lambda: rows(functools.partial(plus, ints(3)), ints(4, 3)),
    transform_called_twice=lambda: (lambda f: (f(ints(4, 3)), f(ints(2, 2))))(summed()),
    nested_vmapped=lambda: nest(BOTH),
    nested_outer_on_mesh=lambda: nest(BOTH, outer={"i": "x"}),
    nested_inner_on_mesh=lambda: nest(BOTH, inner={"j": "y"}),
    nested_both_on_mesh=lambda: nest(BOTH, outer={"i": "x"}, inner={"j": "y"}),
    nested_both_tiled=lambda: nest(BOTH, outer={"i": "x"}, inner={"j": "y"}, argument=ints(8, 4, 3)),
    nested_axis_index=lambda: nest(lambda x: x + lax.axis_index("i") * 10 + lax.axis_index("j"), outer={"i": "x"}),
    nested_local=lambda: nest(twice, outer={"i": "x"}, inner={"j": "y"}),
    nested_same_resource=lambda: nest(BOTH, outer={"i": "x"}, inner={"j": "x"}, argument=ints(4, 4, 3)),
    nested_same_name=lambda: nest(lambda x: lax.psum(x, "i"), inner_spec=["i", ...]),
    nested_inner_second_axis=lambda: nest(lambda x: lax.psum(x, "j") + x, inner_spec=[None, "j"], outer={"i": "x"}),
    nested_grad_inside=lambda: nest(
        jax.grad(lambda x: jnp.sum(lax.psum(x, ("i", "j")) * x)), outer={"i": "x"}, argument=floats(4, 2, 3)
    ),
)

# Serial loops --------------------------------------------------------------------------------------------------------


def looped(body, length, size=8):
    return rows(body, ints(size, 3), axis_resources={"i": maps().SerialLoop(length)})


def shared_loops(first, second):
    body = xmap(lambda x, y: x * 10 + y, (["i"], ["j"]), ["i", "j"], axis_resources={"i": first, "j": second})
    return body(ints(4), ints(6))


@program
def loop_named_for_two_axes():
    with maps().serial_loop("l", 2):
        return shared_loops("l", "l")


@program
def loop_on_mesh_axis():
    with mesh(x=2):
        return rows(twice, ints(8, 3), axis_resources={"i": ("x", maps().SerialLoop(2))})


@program
def loop_named():
    with maps().serial_loop("l", 4):
        return rows(twice, ints(8, 3), axis_resources={"i": "l"}), environment_shape()


@program
def loop_named_beside_mesh():
    with mesh(x=2), maps().serial_loop("l", 4):
        body = xmap(plus, (["i", ...], ["j", ...]), ["i", "j", ...], axis_resources={"i": "l", "j": "x"})
        return body(ints(8, 3), ints(2, 3))


table(
    loop_local=lambda: looped(twice, 4),
    loop_of_two_axes=lambda: shared_loops(maps().SerialLoop(2), maps().SerialLoop(2)),
    loop_shared_by_two_axes=lambda: (lambda loop: shared_loops(loop, loop))(maps().SerialLoop(2)),
    loop_of_one=lambda: looped(twice, 1),
    loop_index=lambda: looped(lambda x: lax.axis_index("i"), 4),
    loop_psum=lambda: looped(SUM, 4),
    loop_not_divisible=lambda: looped(twice, 3),
    loop_grad_inside=lambda: rows(
        jax.grad(lambda x: jnp.sum(x**3)), floats(8, 3), axis_resources={"i": maps().SerialLoop(4)}
    ),
    loop_other_axis_psum=lambda: xmap(
        lambda x: lax.psum(x, "j"), ["i", "j"], ["i"], axis_resources={"i": maps().SerialLoop(2)}
    )(ints(4, 3)),
    loop_equality=lambda: (
        np.bool_(maps().SerialLoop(2) == maps().SerialLoop(2)),
        np.int32(maps().SerialLoop(3).length),
    ),
)

# Donation ------------------------------------------------------------------------------------------------------------


def donated(donate, laid_out=False, **sizes):
    """The result, and which of the three arrays are gone afterwards; `laid_out`: they were results of xmap before."""
    state, batch = {"a": jnp.asarray(floats(4, 3)), "b": jnp.asarray(floats(4, 2))}, jnp.asarray(floats(4, 3) + 1)
    step = lambda s, x: ({"a": s["a"] + x, "b": s["b"] * 2}, lax.psum(x, "i"))
    with on(sizes):
        resources = {"i": "x"} if sizes else {}
        if laid_out:
            state, batch = rows(lambda s, x: (s, x), state, batch, axis_resources=resources)
        result = rows(step, state, batch, donate_argnums=donate, axis_resources=resources)
        jax.block_until_ready(result)
    return result, [np.bool_(array.is_deleted()) for array in (state["a"], state["b"], batch)]


table(
    donate_nothing=lambda: donated(()),
    donate_first=lambda: donated(0),
    donate_tuple=lambda: donated((0, 1)),
    donate_list=lambda: donated([1]),
    donate_laid_out=lambda: donated(0, laid_out=True, x=4),
    donate_laid_out_both=lambda: donated((0, 1), laid_out=True, x=2),
    donate_elsewhere=lambda: donated(0, x=4),
    donate_beyond_arguments=lambda: donated((5,)),
    donate_negative=lambda: donated((-1,)),
)
