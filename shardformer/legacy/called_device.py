"""`x.device()`, where today's `x.device` is the device itself.

A device that can be called fails in jax, which keeps no weak reference to it. What only resembles a device fails in
pmap and Mesh. So the member looks at the instruction that reads it: Python loads a method for `x.device()`.
"""

import dis
import functools
import sys
import types

import jax


class CalledDevice:
    """The member `device` of a class of arrays: a function where it is called, otherwise today's property."""

    def __init__(self, today: property):
        self.today = today

    def __get__(self, array, owner: type | None = None):
        if array is None:
            return self
        if _loads_a_method(sys._getframe(1)):
            return functools.partial(_only_device, array)
        return self.today.__get__(array, owner)


def _loads_a_method(frame: types.FrameType) -> bool:
    """Returns True if a frame is about to call what it reads; `getattr` does not tell, nor an assert of pytest."""
    instruction, argument = frame.f_code.co_code[frame.f_lasti :][:2]
    if sys.version_info < (3, 12):
        return dis.opname[instruction] == "LOAD_METHOD"
    return dis.opname[instruction] == "LOAD_ATTR" and bool(argument & 1)


def _only_device(array: jax.Array) -> jax.Device:
    devices = array.devices()
    if len(devices) > 1:
        raise ValueError(f"x.device() got an array on {len(devices)} devices; call x.devices()")
    return next(iter(devices))
