"""Members that arrays have lost: `x.device()`, `x.device_buffer`, and those that GlobalDeviceArray had."""

import contextlib

import jax
import jax.numpy as jnp

REMOVED_MEMBERS = {
    "device_buffer": "x.addressable_data(0)",
    "device_buffers": "[shard.data for shard in x.addressable_shards]",
    "local_shards": "x.addressable_shards",
    "local_data": "x.addressable_data(i)",
}
CALLED_PROPERTIES = {"device": "x.device, which is no method any more"}


def put_back(stack: contextlib.ExitStack) -> None:
    """Gives arrays their old members, until `stack` closes."""
    array, device = type(jnp.zeros(())), type(jax.devices()[0])
    _set(stack, array, "device_buffer", property(lambda x: x.addressable_data(0)))
    _set(stack, array, "device_buffers", property(lambda x: [shard.data for shard in x.addressable_shards]))
    _set(stack, array, "local_shards", property(lambda x: x.addressable_shards))
    _set(stack, array, "local_data", lambda x, index=0: x.addressable_data(index))
    # `x.device` is the device today, or the sharding of an array on several, for which `x.device()` raised as well.
    _set(stack, device, "__call__", lambda device: device)


def _set(stack: contextlib.ExitStack, owner: type, name: str, value) -> None:
    if name in vars(owner):  # today's jax has some only to say that they are gone
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
