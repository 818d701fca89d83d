"""Programs about options, small names, keywords and members that jax has dropped since."""

import io

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .arguments import BY_MESH, SUM
from .registry import floats, ints, maps, mesh, program, rows, table

# Options -------------------------------------------------------------------------------------------------------------


def with_options(**options):
    """A sum over a mesh axis while options are set, and the options as they are read then."""
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        with mesh(x=4):
            return rows(SUM, ints(8, 3), **BY_MESH), [np.bool_(getattr(jax.config, name)) for name in options]
    finally:
        for name, value in reversed(before.items()):
            jax.config.update(name, value)


@program
def option_as_flag():
    jax.config.FLAGS.jax_xla_backend = "xla"
    return np.bool_(isinstance(jax.config.FLAGS.jax_enable_x64, bool))


@program
def option_module():
    from jax.config import config

    config.update("jax_enable_x64", config.jax_enable_x64)
    return np.bool_(config is jax.config)


table(
    option_spmd_lowering=lambda: with_options(experimental_xmap_spmd_lowering=True),
    option_manual_lowering=lambda: with_options(
        experimental_xmap_spmd_lowering=True, experimental_xmap_spmd_lowering_manual=True
    ),
    option_fixed_sharding=lambda: with_options(
        experimental_xmap_spmd_lowering=True, experimental_xmap_ensure_fixed_sharding=True
    ),
    option_jax_array=lambda: with_options(jax_array=True),
    option_output_gda=lambda: with_options(jax_parallel_functions_output_gda=False),
    option_unknown=lambda: jax.config.update("jax_no_such_option", True),
    option_omnistaging=lambda: np.bool_(jax.config.omnistaging_enabled),
)

# Names ---------------------------------------------------------------------------------------------------------------


@program
def names_of_maps():
    from jax.experimental.maps import EMPTY_ENV, AxisName, ResourceSet, xmap_p

    return np.int32(len(EMPTY_ENV.shape)), np.bool_([value is not None for value in (AxisName, ResourceSet, xmap_p)])


@program
def names_of_pjit():
    from jax.experimental.pjit import AUTO, ParsedPartitionSpec, pjit_p

    parsed = ParsedPartitionSpec.from_user_input(PartitionSpec("x", None, ("y", "z")), "a spec")
    assert parsed.get_partition_spec() == PartitionSpec("x", None, ("y", "z"))
    return np.bool_([AUTO is not None, pjit_p is not None]), np.int32([len(axes) for axes in parsed.partitions])


@program
def sharded_array_by_default():
    from jax.interpreters import pxla

    parts = [jax.device_put(ints(3) + number, device) for number, device in enumerate(jax.devices()[:4])]
    return pxla.make_sharded_device_array(jax.core.ShapedArray((4, 3), jnp.int32), None, parts)


@program
def sharded_array_by_spec():
    from jax.interpreters import pxla

    spec = pxla.ShardingSpec([pxla.Chunked([2]), pxla.NoSharding()], [pxla.ShardedAxis(0), pxla.Replicated(2)])
    halves = [ints(2, 3), ints(2, 3), ints(2, 3) + 6, ints(2, 3) + 6]
    parts = [jax.device_put(half, device) for half, device in zip(halves, jax.devices(), strict=False)]
    return pxla.make_sharded_device_array(jax.core.ShapedArray((4, 3), jnp.int32), spec, parts)


@program
def mesh_of_pxla():
    from jax.interpreters import pxla

    with pxla.Mesh(np.array(jax.devices()[:4]), ("x",)):
        return rows(SUM, ints(8, 3), **BY_MESH)


@program
def global_device_array():
    from jax.experimental.global_device_array import GlobalDeviceArray

    array = GlobalDeviceArray.from_callback((8, 2), mesh(x=4, y=2), ["x", "y"], lambda index: ints(8, 2)[index])
    assert isinstance(array, GlobalDeviceArray)
    return array, array.local_data(1), np.int32(len(array.local_shards))


@program
def host_callback_call():
    from jax.experimental import host_callback

    doubled = jax.jit(lambda x: host_callback.call(lambda x: np.asarray(x) * 2, x, result_shape=x) + 1)
    return doubled(floats(3)), host_callback.call(lambda _: 7, floats(3), result_shape=np.int32(0))


@program
def host_callback_tap():
    from jax.experimental import host_callback

    seen = []
    tapped = jax.jit(lambda x: host_callback.id_tap(lambda value, _: seen.append(np.asarray(value)), x * 2))
    gradient = jax.grad(lambda x: jnp.sum(tapped(x) ** 2))(floats(3))
    host_callback.barrier_wait()
    return gradient, seen, host_callback.id_tap(lambda value, _: None, floats(3), result=ints(2))


@program
def host_callback_print():
    from jax.experimental import host_callback

    stream = io.StringIO()
    host_callback.id_print((floats(3), {"b": ints(2)}), what="a tree", output_stream=stream)
    host_callback.barrier_wait()
    return np.frombuffer(stream.getvalue().encode(), np.uint8)


@program
def dlpack_capsule():
    from jax.dlpack import from_dlpack, to_dlpack

    return from_dlpack(to_dlpack(jnp.asarray(floats(3))))


# Keywords and members ------------------------------------------------------------------------------------------------


def pure_call(**keywords):
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    body = lambda x: jax.pure_callback(lambda x: np.asarray(x) * 2, shape, x, **keywords)
    return rows(body, floats(4, 3))


table(
    keyword_clip=lambda: jnp.clip(floats(4), a_min=-0.5, a_max=0.5),
    keyword_clip_of_a=lambda: jnp.clip(a=floats(4), a_min=-0.5, a_max=None),
    keyword_clip_positions=lambda: jnp.clip(floats(4), -0.5, 0.5),
    keyword_newshape=lambda: jnp.reshape(ints(4), newshape=(2, 2)),
    keyword_quantile=lambda: jnp.quantile(floats(5), 0.3, interpolation="lower"),
    keyword_percentile=lambda: jnp.percentile(floats(5), 30.0, interpolation="higher"),
    keyword_nanquantile=lambda: jnp.nanquantile(floats(5), 0.3, interpolation="midpoint"),
    keyword_nanpercentile=lambda: jnp.nanpercentile(floats(5), 30.0, interpolation="nearest"),
    keyword_vectorized=lambda: pure_call(vectorized=True),
    keyword_not_vectorized=lambda: pure_call(vectorized=False),
    keyword_pure_callback_by_default=lambda: pure_call(),
    keyword_concrete=lambda: jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x)), concrete=False))(floats(3)),
    keyword_concrete_true=lambda: jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x)), concrete=True))(floats(3)),
    keyword_softmax_initial=lambda: jax.nn.softmax(floats(3), initial=-jnp.inf),
    keyword_linear=lambda: jax.lax.cond(True, jnp.sin, jnp.cos, floats(3), linear=(False,)),
    keyword_sym_pos=lambda: jax.scipy.linalg.solve(2 * np.eye(3, dtype=np.float32), floats(3), sym_pos=True),
    member_device=lambda: np.int32(jax.device_put(floats(3), jax.devices()[2]).device().id),
    member_device_buffer=lambda: jnp.asarray(floats(3)).device_buffer,
    member_device_buffers=lambda: jnp.asarray(floats(3)).device_buffers,
    member_device_of_many=lambda: many().device(),
    environment_of_maps=lambda: np.bool_(maps().EMPTY_ENV.physical_mesh.empty),
)


def many():
    return jax.device_put(floats(8), jax.sharding.NamedSharding(mesh(x=4), PartitionSpec("x")))
