"""`x.device()` of an array on one device, where today's `x.device` is the device itself."""

import jax
from jax.sharding import Sharding, SingleDeviceSharding


class CallableDevice(SingleDeviceSharding):
    """What `x.device` returns: old code calls it; newer code reads its members, compares it, or passes it to jax.

    jax accepts a layout wherever it accepts a device. Its own devices cannot be made callable: it would keep weak
    references to them, which they do not have.
    """

    def __call__(self) -> jax.Device:
        return next(iter(self.device_set))

    def __getattr__(self, name: str):
        if name.startswith("_"):  # copying and the like ask for members before there is a device
            raise AttributeError(name)
        return getattr(self(), name)

    def __eq__(self, other) -> bool:
        return self() == other or super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self())

    def __repr__(self) -> str:
        return repr(self())

    def __str__(self) -> str:
        return str(self())


def device_of(array: jax.Array) -> CallableDevice | Sharding:
    """Returns the property `device` of an array; that of an array on several devices is its layout, as today."""
    devices = array.devices()
    return CallableDevice(*devices) if len(devices) == 1 else array.sharding
