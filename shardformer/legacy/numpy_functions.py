"""Functions and values that NumPy has dropped, as they were."""

import contextlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

NINF, PZERO, NZERO = -np.inf, 0.0, -0.0

sctypes = {
    "int": [np.int8, np.int16, np.int32, np.int64],
    "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
    "float": [np.float16, np.float32, np.float64, np.longdouble],
    "complex": [np.complex64, np.complex128, np.clongdouble],
    "others": [bool, object, bytes, str, np.void],
}


class _Casts(dict):
    """np.cast[dtype](x): conversions by type."""

    def __missing__(self, key):
        return lambda x: np.asarray(x).astype(key)


class _Types(dict):
    """np.typeDict[name]: scalar types by name; today's np.sctypeDict has fewer names."""

    def __missing__(self, key):
        return np.dtype(key).type


cast, typeDict = _Casts(), _Types(np.sctypeDict)


def alen(a) -> int:
    try:
        return len(a)
    except TypeError:
        return 1


def asfarray(a, dtype=np.float64) -> np.ndarray:
    return np.asarray(a, dtype=dtype if np.issubdtype(dtype, np.inexact) else np.float64)


def asscalar(a):
    return a.item()


def disp(mesg, device=None, linefeed: bool = True) -> None:
    device = sys.stdout if device is None else device
    device.write(f"{mesg}\n" if linefeed else f"{mesg}")
    device.flush()


def find_common_type(array_types: Sequence, scalar_types: Sequence) -> np.dtype | None:
    """Returns the largest array type; the largest scalar type if that one is of a higher kind."""
    arrays, scalars = ([np.dtype(each) for each in types_] for types_ in (array_types, scalar_types))
    largest = np.result_type(*arrays) if arrays else None
    scalar = np.result_type(*scalars) if scalars else None
    if largest is None or scalar is None:
        return scalar if largest is None else largest
    kinds = "buifcSUVO"
    if largest.kind not in kinds or scalar.kind not in kinds:
        return None
    is_higher = kinds.index(scalar.kind) > kinds.index(largest.kind)
    return np.promote_types(scalar, largest) if is_higher else largest


def in1d(ar1, ar2, assume_unique: bool = False, invert: bool = False, *, kind: Any = None) -> np.ndarray:
    """Returns np.isin of the flattened array."""
    return np.isin(np.ravel(ar1), ar2, assume_unique=assume_unique, invert=invert, kind=kind)


def issctype(rep) -> bool:
    return isinstance(rep, type | np.dtype) and obj2sctype(rep) not in (None, np.object_)


def issubclass_(arg1, arg2) -> bool:
    return isinstance(arg1, type) and issubclass(arg1, arg2)


def issubsctype(arg1, arg2) -> bool:
    return issubclass(obj2sctype(arg1), obj2sctype(arg2))


def maximum_sctype(t):
    """Returns the largest type of the same kind."""
    largest = {"i": np.int64, "u": np.uint64, "f": np.longdouble, "c": np.clongdouble}
    scalar = obj2sctype(t)
    return t if scalar is None else largest.get(np.dtype(scalar).kind, scalar)


def msort(a) -> np.ndarray:
    return np.sort(a, axis=0)


def obj2sctype(rep, default=None):
    """Returns the scalar type of a type, or of an array's elements."""
    if isinstance(rep, type) and issubclass(rep, np.generic):
        return rep
    if isinstance(rep, np.ndarray):
        return rep.dtype.type
    with contextlib.suppress(TypeError):
        return np.dtype(rep).type
    return default


def sctype2char(sctype) -> str:
    scalar = obj2sctype(sctype)
    if scalar is None:
        raise ValueError("unrecognized type")
    return np.dtype(scalar).char


def deprecate(*arguments: Any, **_: Any):
    """Returns a function, or a decorator, that does not warn."""
    if arguments and isinstance(arguments[0], types.FunctionType):
        return arguments[0]
    return _unchanged


def _unchanged(function):
    return function
