"""Moves the arguments of an xmap to the layout that its mesh wants, also while grad, vmap or checkpoint trace them.

`jax.jit` refuses an argument that was committed to another layout. A concrete array is moved by `jax.device_put`; what
a transform traces has no layout to ask for, so it passes through a primitive, whose implementation sees the array in
the end. The transpose moves a cotangent to the devices of the value it belongs to, which `device_put` alone would not.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding


def relocate(x, sharding: Sharding):
    """`x`, an array or a tracer, in the layout `sharding`."""
    if isinstance(x, jax.core.Tracer):
        return _relocate.bind(x, x, sharding=sharding, back=False)
    if getattr(x, "sharding", None) == sharding:
        return x
    return jax.device_put(x, sharding)


def anchor(x):
    """`x`; a tracer's cotangent will come to the devices of `x`, wherever it was created."""
    return _relocate.bind(x, x, sharding=None, back=False) if isinstance(x, jax.core.Tracer) else x


def gather_on_one_device(leaves: list) -> list:
    """For a function without a mesh: arrays that were committed to different devices meet on the default device."""
    (device,) = jnp.zeros(()).devices()
    return [relocate(leaf, SingleDeviceSharding(device)) for leaf in leaves]


def lie_apart(leaves: list) -> bool:
    """Returns True if concrete arrays are committed to different sets of devices."""
    committed = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    return len({frozenset(leaf.devices()) for leaf in committed if leaf.committed}) > 1


# x in the layout `sharding` (None: as it is); with back=True, x on the devices of `like`.
_relocate = Primitive("relocate")
_relocate.def_abstract_eval(lambda x, like, **_: x)
mlir.register_lowering(_relocate, mlir.lower_fun(lambda x, like, **_: x, multiple_results=False))


@_relocate.def_impl
def _move(x, like, *, sharding: Sharding | None, back: bool):
    if back:
        if not getattr(like, "committed", False):
            return x  # an uncommitted argument goes with any layout
        sharding = like.sharding if jnp.ndim(x) == jnp.ndim(like) else replicated(like.sharding)
    return x if sharding is None else relocate(x, sharding)


def _differentiate(primals, tangents, **how):
    x, like = primals
    tangent = tangents[0]
    return _relocate.bind(x, like, **how), (
        tangent if isinstance(tangent, ad.Zero) else _relocate.bind(tangent, like, **how)
    )


def _transpose(cotangent, x, like, *, sharding: Sharding | None, back: bool):
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None]
    return [_relocate.bind(cotangent, like, sharding=sharding, back=not back), None]


def _batch(values, dimensions, *, sharding: Sharding | None, back: bool):
    (x, like), (dimension, of_like) = values, dimensions
    if dimension is None:
        return _relocate.bind(x, like, sharding=sharding, back=back), None
    if back and of_like is not None:
        x, dimension = jnp.moveaxis(x, dimension, of_like), of_like
    return _relocate.bind(x, like, sharding=_with_dimension(sharding, dimension), back=back), dimension


ad.primitive_jvps[_relocate] = _differentiate
ad.primitive_transposes[_relocate] = _transpose
batching.primitive_batchers[_relocate] = _batch


def _with_dimension(sharding: Sharding | None, dimension: int) -> Sharding | None:
    """The layout of an array that has one dimension more, which is not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = [*sharding.spec] + [None] * max(0, dimension - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec[:dimension], None, *spec[dimension:]))


def replicated(sharding: Sharding) -> Sharding:
    """Returns the layout on the same devices that repeats an array on each."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
