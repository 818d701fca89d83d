"""Programs about resources and the mesh that is looked up."""

import threading

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .arguments import BY_MESH, SUM, on_mesh
from .registry import ints, maps, mesh, program, rows, table, twice, within, xmap

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
