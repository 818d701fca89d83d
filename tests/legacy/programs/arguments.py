"""Programs about specs of arguments and results, and about sizes."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .registry import floats, ints, mesh, plus, rows, table, twice, xmap

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
    spec_size_zero_omitted=lambda: xmap(twice, ["i", ...], [...])(ints(0, 3)),
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
