"""Puts members of arrays, primitives and stages back: `x.device_buffer`, `x.device()`, those of GlobalDeviceArray."""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec
from jax.stages import Compiled, Lowered

from shardformer.legacy import frozen_dicts, missing_packages, package_stand_ins
from shardformer.legacy.called_device import CalledDevice
from shardformer.legacy.lost_names import FLAX_MODELS

# What Python says where a script calls one of them, and the advice.
ADVICE = {
    "'dict' object has no attribute 'unfreeze'": frozen_dicts.ADVICE,
    "incompatible devices for jitted computation": "jax: the result of a pmap met arrays on one device up to jax 0.4; "
    "today write jax.device_put(x, device) around it, or around the other",
    "only 0-dimensional arrays can be converted": "numpy: float(x) of an array with one value is x.item() today",
    "cannot import name 'Flax": f"transformers: {FLAX_MODELS}",
    "Device' object is not callable": "jax: x.device() is x.device today; an assert of pytest and getattr read it "
    "before they call it: write device = x.device() on a line before",
    "Sharding' object is not callable": "jax: x.device() of an array on several devices is x.devices() today; in an "
    "assert of pytest, write devices = x.devices() on a line before",
}


def put_back(stack: contextlib.ExitStack) -> None:
    """Gives arrays and primitives their old members, until `stack` closes."""
    _set(stack, Primitive, "map_primitive", False)
    arrays = _classes_of_arrays()
    for array in arrays:
        _set(stack, array, "device", CalledDevice(vars(array)["device"]))
        _set(stack, array, "device_buffer", property(lambda x: x.addressable_data(0)))
        _set(stack, array, "device_buffers", property(lambda x: [shard.data for shard in x.addressable_shards]))
        _set(stack, array, "local_shards", property(lambda x: x.addressable_shards))
        _set(stack, array, "local_data", lambda x, index=0: x.addressable_data(index))
        _set(stack, array, "unsafe_raw_array", jax.random.key_data)
        _set(stack, array, "to_py", lambda x: np.asarray(x))
        _set(stack, array, "block_host_until_ready", lambda x: x.block_until_ready())
        for conversion in vars(array).keys() & {"__int__", "__float__", "__complex__"}:  # random keys have none
            _set(stack, array, conversion, _of_one_value(vars(array)[conversion]))
    for member in ("as_text", "compiler_ir"):
        _set(stack, Lowered, member, _naming_mhlo(getattr(Lowered, member)))
    _set(stack, Compiled, "compiler_ir", lambda compiled: compiled.runtime_executable().hlo_modules())
    _set(stack, Compiled, "__call__", _with_jit(Compiled.__call__))
    _set(stack, PartitionSpec, "__eq__", _equals_tuple)
    _set(stack, PartitionSpec, "__hash__", lambda spec: hash(spec.partitions))
    for owner in (*arrays, jax.Array, jax.core.Tracer):
        _set(stack, owner, "split", jnp.split)
        _set(stack, owner, "broadcast", jax.lax.broadcast)
        _set(stack, owner, "broadcast_in_dim", jax.lax.broadcast_in_dim)


def _of_one_value(conversion: Callable) -> Callable:
    """Returns a conversion to a Python number that accepts an array of one value, whatever its rank is."""

    @functools.wraps(conversion)
    def convert(array):
        return conversion(array.reshape(()) if array.size == 1 else array)

    return convert


def _equals_tuple(spec: PartitionSpec, other) -> bool:
    """Returns True for the tuple that a PartitionSpec was; `P("x") == ("x",)` would be False without an error."""
    was_tuple = not (spec.unreduced or spec.reduced)
    return spec is other or (was_tuple and isinstance(other, tuple) and spec.partitions == other)


def _naming_mhlo(method: Callable) -> Callable:
    """Returns a method of a lowered program that accepts the dialect "mhlo" too: it is stablehlo today."""

    @functools.wraps(method)
    def call(lowered, dialect=None, **options):
        return method(lowered, "stablehlo" if dialect == "mhlo" else dialect, **options)

    return call


def _with_jit(method: Callable) -> Callable:
    """Returns the call of a compiled program, which `jax.disable_jit()` did not stop."""

    @functools.wraps(method)
    def call(compiled, *args, **kwargs):
        with jax.disable_jit(False):
            return method(compiled, *args, **kwargs)

    return call


def advise(error: BaseException) -> None:
    """Adds to an error what today's way is, where it comes of a member that cannot be put back."""
    module = error.name if isinstance(error, ImportError) else getattr(getattr(error, "obj", None), "__name__", "")
    is_missing = isinstance(error, ModuleNotFoundError) or package_stand_ins.stands_in(module or "")
    if is_missing and (line := missing_packages.advice(module or "")):
        error.add_note(f"{module} is not installed: {line}")
    for words, advice in ADVICE.items():
        if isinstance(error, AttributeError | ImportError | TypeError | ValueError) and words in str(error):
            error.add_note(advice)


def _classes_of_arrays() -> list[type]:
    """Returns the classes of concrete arrays. An array would tell, but making one starts the backend too early."""
    return [kind for kind in jax.Array.__subclasses__() if "addressable_data" in vars(kind)]


def _set(stack: contextlib.ExitStack, owner: type, name: str, value) -> None:
    if name in vars(owner):  # today's jax has some only to say that they are gone
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
