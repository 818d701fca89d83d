"""Small functions that jax has dropped, as they were."""

import ctypes
import functools
from collections.abc import Sequence

import jax
import jax.extend.random
import jax.numpy as jnp

from shardformer.legacy.pmap_shardings import PmapSharding

NINF, PZERO, NZERO = -jnp.inf, 0.0, -0.0

curry = functools.partial(functools.partial, functools.partial)


def host_ids(backend=None) -> list[int]:
    return list(range(jax.process_count(backend)))


def enable_x64(new_val: bool = True):
    return jax.enable_x64(new_val)


def disable_x64():
    return jax.enable_x64(False)


def setup_tpu(tpu_driver_version: str | None = None) -> None:
    """Does nothing: jax finds the TPU of a notebook by itself."""


def tie_in(x, y):
    return y


def in1d(ar1, ar2, assume_unique: bool = False, invert: bool = False):
    """Returns jnp.isin of the flattened array."""
    return jnp.isin(ar1, ar2, assume_unique=assume_unique, invert=invert).ravel()


def msort(a):
    return jnp.sort(a, axis=0)


def shuffle(key, x, axis: int = 0):
    """Shuffles every column by itself, while `permutation` moves whole rows."""
    return jax.random.permutation(key, x, axis, independent=True)


def default_prng_impl():
    implementations = {
        "rbg": jax.extend.random.rbg_prng_impl,
        "threefry2x32": jax.extend.random.threefry_prng_impl,
        "unsafe_rbg": jax.extend.random.unsafe_rbg_prng_impl,
    }
    return implementations[jax.config.jax_default_prng_impl]


def rbg_key(seed: int):
    return jax.random.PRNGKey(seed, impl="rbg")


def threefry2x32_key(seed: int):
    return jax.random.PRNGKey(seed, impl="threefry2x32")


def unsafe_rbg_key(seed: int):
    return jax.random.PRNGKey(seed, impl="unsafe_rbg")


def sph_harm(m, n, theta, phi, n_max: int | None = None):
    """Spherical harmonics of order m and degree n; theta is the azimuth, and phi the polar angle."""
    return jax.scipy.special.sph_harm_y(n, m, phi, theta, n_max=n_max)


def device_put_sharded(shards: Sequence, devices: Sequence[jax.Device]):
    """Stacks a list of trees into one tree; index i of each leaf lies on device i."""
    if len(shards) != len(devices):
        raise ValueError(f"device_put_sharded takes a shard for every device; got {len(shards)} for {len(devices)}")
    return jax.tree.map(lambda *leaves: _put_over(devices, leaves), *shards)


def device_put_replicated(x, devices: Sequence[jax.Device]):
    """Repeats a tree along a new leading axis, once on each device."""
    return jax.tree.map(lambda leaf: _put_over(devices, [leaf] * len(devices)), x)


def _put_over(devices: Sequence[jax.Device], leaves: Sequence):
    """Returns the array of `leaves` in their common type, of which each goes to its device from wherever it lies."""
    shape = (len(devices), *jnp.shape(leaves[0]))
    sharding = PmapSharding.default(shape, devices=devices)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # they lie nowhere yet
        return jax.device_put(jnp.stack(leaves), sharding)
    rows = [jax.device_put(leaf, device)[None] for leaf, device in zip(leaves, devices, strict=True)]
    dtype = jnp.result_type(*rows)
    rows = [row if row.dtype == dtype else row.astype(dtype) for row in rows]  # keys have no astype
    return jax.make_array_from_single_device_arrays(shape, sharding, rows)


def _index_function(method: str):
    def update(x, idx, y, indices_are_sorted: bool = False, unique_indices: bool = False):
        at = getattr(jnp.asarray(x).at[idx], method)
        return at(y, indices_are_sorted=indices_are_sorted, unique_indices=unique_indices)

    return update


index_update = _index_function("set")
index_add = _index_function("add")
index_mul = _index_function("multiply")
index_min = _index_function("min")
index_max = _index_function("max")


# DLPack, when a capsule was passed around instead of the array.

_from_dlpack = jax.dlpack.from_dlpack  # before `install()` puts ours in its place


class _Capsule:
    """An object of today's protocol around a capsule, which tells its device."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # A DLManagedTensor starts with the pointer to its data; then come the type and the number of the device.
        fields = get_pointer(self.capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        kind, number = (ctypes.c_int32 * 2).from_address(fields)
        return kind, number


@functools.wraps(_from_dlpack)
def from_dlpack(dlpack, *args, **kwargs):
    return _from_dlpack(dlpack if hasattr(dlpack, "__dlpack__") else _Capsule(dlpack), *args, **kwargs)


def to_dlpack(x, take_ownership: bool = False, stream=None):
    return x.__dlpack__() if stream is None else x.__dlpack__(stream=stream)
