"""The files of Grok-1's checkpoint: each is a pickle of one array or of one `QuantizedWeight8bit`.

Read without running anything. The classes and functions that these pickles name are only compared with known names.
"""

import dataclasses
import math
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardformer.checkpoint.safe_pickle import ObjectMachine, run
from shardformer.errors import RunError, UsageError, describe_error, describe_value
from shardformer.files import read_bytes

DTYPES = {"f4": np.dtype(np.float32), "i1": np.dtype(np.int8), "bfloat16": np.dtype(jnp.bfloat16)}
ARRAY, JAX_ARRAY, NDARRAY = "_reconstruct", "_reconstruct_array", "ndarray"
QUANTIZED = "QuantizedWeight8bit"
KNOWN = {
    "numpy": (ARRAY, NDARRAY, "dtype"), "ml_dtypes": ("bfloat16",), "jax": (JAX_ARRAY,),
    "__main__": (QUANTIZED,), "model": (QUANTIZED,),
}  # fmt: skip


LONG = 1 << 16  # bytes of an argument that only an array has


@dataclasses.dataclass(frozen=True)
class Skipped:
    """The content of an array that was not read."""

    size: int

    def __len__(self) -> int:
        return self.size


class SkippingFile:
    """A file as `pickletools.genops` reads it, without the contents of its arrays."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size = file, size
        self.readline, self.tell = file.readline, file.tell

    def __len__(self) -> int:
        return self._size

    def read(self, count: int) -> bytes | Skipped:
        start = self._file.tell()
        if count <= LONG or start + count > self._size:
            return self._file.read(min(count, LONG))
        self._file.seek(start + count)
        return Skipped(count)


class Name(NamedTuple):
    """A class or function that a pickle names: one of `KNOWN`, by its package."""

    name: str


@dataclasses.dataclass
class Array:
    """An array, empty until the pickle gives its state."""

    values: np.ndarray | None = None

    def build(self, state) -> None:
        _, shape, dtype, fortran_order, content = state
        if not isinstance(dtype, np.dtype) or type(content) not in (bytes, Skipped) or type(shape) is not tuple:
            raise UnpicklingError("it has an array that is not described as NumPy describes one")
        # Without limits, the product of many long numbers would take hours.
        if len(shape) > 4 or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
            raise UnpicklingError("it has an array with more than 4 sizes, or with one that is not a number of rows")
        if math.prod(shape) * dtype.itemsize != len(content):
            raise UnpicklingError(f"it has {len(content)} bytes for an array {dtype}{list(shape)}")
        if isinstance(content, Skipped):
            self.values = np.broadcast_to(np.zeros((), dtype), shape)  # one number in memory
            return
        self.values = np.frombuffer(content, dtype).reshape(shape, order="F" if fortran_order else "C")


@dataclasses.dataclass
class Quantized:
    """An int8 matrix and its scales, whose rows each belong to an equal number of the matrix's rows."""

    weight: Array | None = None
    scales: Array | None = None

    def build(self, state) -> None:
        if type(state) is not dict or state.keys() != {"weight", "scales"}:
            raise UnpicklingError(f"it has a {QUANTIZED} without exactly weight and scales")
        self.weight, self.scales = state["weight"], state["scales"]


class _Weights(ObjectMachine):
    """The opcodes of one array or one quantised weight."""

    def run(self, opcode: str, argument) -> None:
        if self.run_object(opcode, argument):
            return
        put, pop = self._stack.append, self._pop
        match opcode:
            case "SHORT_BINBYTES" | "BINBYTES" | "BINBYTES8":
                put(argument)
            case "REDUCE" | "NEWOBJ":
                put(_call(*pop(2)))
            case "BUILD":
                (state,) = pop(1)
                _build(self._stack[-1], state)
            case _:
                raise UnpicklingError(
                    f"it has the opcode {opcode} ({describe_value(argument)}), which weights do not need"
                )

    def _find_name(self, module, name) -> Name:
        return _find_name(module, name)


def _find_name(module, name) -> Name:
    if type(module) is not str or type(name) is not str or name not in KNOWN.get(module.partition(".")[0], ()):
        raise UnpicklingError(
            f"it asks for {describe_value(module)}.{describe_value(name)}, and weights need only arrays"
        )
    return Name(name)


def _call(function, arguments):
    if type(function) is not Name or type(arguments) is not tuple:
        raise UnpicklingError("it calls something that is not a function")
    match function.name, arguments:
        case "dtype", (str() | Name() as kind, *_):
            name = kind.name if isinstance(kind, Name) else kind
            if name in DTYPES:
                return DTYPES[name]
            raise UnpicklingError(f"it has an array of {describe_value(name)}, expected one of {', '.join(DTYPES)}")
        case "_reconstruct", (Name(name="ndarray"), *_):
            return Array()
        case "_reconstruct_array", (Name(name="_reconstruct"), _, state, _):  # a jax.Array, with NumPy's state
            array = Array()
            array.build(state)
            return array
        case "QuantizedWeight8bit", ():
            return Quantized()
    raise UnpicklingError(f"it calls {function.name} with unknown arguments")


def _build(target, state) -> None:
    if isinstance(target, np.dtype):
        if state[1] not in ("<", "|"):
            raise UnpicklingError("it was written by a big-endian machine")
    elif isinstance(target, Array | Quantized):
        target.build(state)
    else:
        raise UnpicklingError(f"it gives a state to a {type(target).__name__}")


def read_weight(path: Path) -> np.ndarray:
    """Returns the array of a file, in float32."""
    try:
        pickled = read_bytes(path, os.stat(path).st_size)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    try:
        content = run(pickled, _Weights(), len(pickled))
        del pickled
        if isinstance(content, Quantized):
            return _multiply(_values(content.weight), _values(content.scales))
        return _values(content).astype(np.float32, copy=False)
    except Exception as error:
        raise UsageError(f"{path} was not loaded, as it may hold only an array: {describe_error(error)}") from None


def read_shape(path: Path) -> tuple[int, ...]:
    """Returns the shape of a file's array; the content of the array is not read."""
    try:
        with path.open("rb") as file:
            pickled = SkippingFile(file, os.stat(path).st_size)
            content = run(pickled, _Weights(), len(pickled))
        return _values(content.weight if isinstance(content, Quantized) else content).shape
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:
        raise UsageError(f"{path} was not loaded, as it may hold only an array: {describe_error(error)}") from None


def _values(array) -> np.ndarray:
    if not isinstance(array, Array) or array.values is None:
        raise UnpicklingError(f"it has a {type(array).__name__} where an array should be")
    return array.values


def _multiply(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Multiplies codes by scales. A matrix whose rows were split over devices has one row of scales for each device."""
    *before, rows, columns = weight.shape
    if scales.ndim != weight.ndim or (*scales.shape[:-2], scales.shape[-1]) != (*before, columns):
        raise UnpicklingError(f"its scales {list(scales.shape)} do not fit its weight {list(weight.shape)}")
    parts = scales.shape[-2]
    if parts < 1 or rows % parts:
        raise UnpicklingError(f"its {rows} rows do not divide into {parts} rows of scales")
    product = weight.reshape(*before, parts, rows // parts, columns) * scales.astype(np.float32)[..., None, :]
    return product.reshape(weight.shape)
