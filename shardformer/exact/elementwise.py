"""Operations on elements: arithmetic, comparisons, bits, special functions and conversions. Integers are XLA's."""

import functools

import numpy as np
import scipy.special
from numpy import ndarray

from shardformer.exact.operations import Operation, is_float, rule, working_dtype


def align(operation: Operation, arrays: tuple[ndarray, ...]) -> list[ndarray]:
    """Gives scalar operands, which JAX allows next to arrays, the rank of the result."""
    rank, k = len(operation.shape), len(operation.mesh)
    return [
        x if x.ndim - k == rank else x.reshape((*x.shape[:k], *[1] * (rank - (x.ndim - k)), *x.shape[k:]))
        for x in arrays
    ]


def _register(names_and_functions: dict) -> None:
    for name, function in names_and_functions.items():
        rule(name)(_apply_to_elements(function))


def _apply_to_elements(function):
    def apply(operation: Operation, *arrays):
        return function(*align(operation, arrays))

    return apply


def _evaluate_polynomial(x, *coefficients):
    return functools.reduce(lambda result, c: result * x + c, reversed(coefficients), np.zeros((), x.dtype))


def _sign(x):
    return np.sign(x) if x.dtype.kind != "c" else np.where(x == 0, 0, x / np.where(x == 0, 1, np.abs(x)))


_register(
    {
        "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
        "max": np.maximum, "min": np.minimum, "abs": np.abs, "sign": _sign, "square": np.square,
        "eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal, "gt": np.greater,
        "le": np.less_equal, "lt": np.less, "is_finite": np.isfinite,
        "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "log2": np.log2,
        "sqrt": np.sqrt, "one_minus_square": lambda x: (1 - x) * (1 + x), "polynomial": _evaluate_polynomial,
        "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "logistic": scipy.special.expit,
        "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
        "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
        "atanh": np.arctanh, "atan2": np.arctan2, "floor": np.floor, "ceil": np.ceil,
        "erf": scipy.special.erf, "erfc": scipy.special.erfc, "erf_inv": scipy.special.erfinv,
        "lgamma": scipy.special.gammaln, "digamma": scipy.special.digamma, "igamma": scipy.special.gammainc,
        "igammac": scipy.special.gammaincc, "bessel_i0e": scipy.special.i0e, "bessel_i1e": scipy.special.i1e,
        "polygamma": scipy.special.polygamma, "zeta": scipy.special.zeta,
        "regularized_incomplete_beta": scipy.special.betainc,
        "real": np.real, "imag": np.imag, "conj": np.conj, "complex": lambda a, b: a + 1j * b,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    }
)  # fmt: skip


def _compare_in_totalorder_totally(compare):
    """Returns the comparison of sorting: -0 is below 0, and NaN above all numbers."""
    return lambda a, b: compare(order_totally(a), order_totally(b))


def order_totally(x: ndarray) -> ndarray:
    """Returns integers in the total order of floats."""
    if x.dtype.kind != "f":
        return x
    bits = np.where(np.isnan(x), np.nan, x).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)


_register(
    {
        "eq_to": _compare_in_totalorder_totally(np.equal),
        "le_to": _compare_in_totalorder_totally(np.less_equal),
        "lt_to": _compare_in_totalorder_totally(np.less),
    }
)


@rule("div")
def divide(operation: Operation, *arrays):
    a, b = align(operation, arrays)
    if is_float(operation.dtype):
        return a / b
    quotient, _ = _truncated_division(a, b)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


@rule("rem")
def remainder(operation: Operation, *arrays):
    a, b = align(operation, arrays)
    if is_float(operation.dtype):
        return np.fmod(a, b)
    return np.where(b == 0, a, _truncated_division(a, b)[1])


def _truncated_division(a, b):
    """Returns the quotient towards zero and the remainder of integers; any values where b is 0."""
    divisor = np.where(b == 0, np.ones((), b.dtype), b)
    # The smallest number over -1 overflows to itself, and its remainder is 0.
    overflows = (divisor == -1) if np.issubdtype(a.dtype, np.signedinteger) else np.False_
    safe = np.where(overflows, np.ones((), b.dtype), divisor)
    rest = np.fmod(a, safe)
    quotient = (a - rest) // safe
    return np.where(overflows, np.negative(a), quotient), np.where(overflows, np.zeros((), a.dtype), rest)


@rule("pow")
def power(operation: Operation, *arrays):
    a, b = align(operation, arrays)
    return np.power(a, b.astype(a.dtype) if is_float(a.dtype) else b)


@rule("integer_pow")
def integer_power(operation: Operation, x):
    y = operation.params["y"]
    if y >= 0 or not is_float(operation.dtype):
        return np.power(x, np.asarray(y).astype(x.dtype) if not is_float(x.dtype) else y)
    return 1 / np.power(x, -y)


@rule("round")
def round_to_integer(operation: Operation, x):
    if int(operation.params["rounding_method"]) == 1:  # to the nearest even integer
        return np.rint(x)
    # Away from zero; the number below 0.5 is not rounded up.
    return np.trunc(x + np.copysign(np.nextafter(0.5, 0), x))


@rule("clamp")
def clamp(operation: Operation, *arrays):
    low, x, high = align(operation, arrays)
    return np.minimum(np.maximum(x, low), high)


@rule("select_n")
def select(operation: Operation, *arrays):
    which, *cases = align(operation, arrays)
    if len(cases) == 2:
        return np.where(which.astype(bool), cases[1], cases[0])
    result = cases[0]
    for i, case in enumerate(cases[1:], 1):
        result = np.where(which == i, case, result)
    return result


@rule("nextafter")
def next_after(operation: Operation, *arrays):
    a, b = (x.astype(operation.dtype) for x in align(operation, arrays))
    return np.nextafter(a, b).astype(np.float64)


def _shift(function, fill):
    def apply(operation: Operation, *arrays):
        x, by = align(operation, arrays)
        bits = x.dtype.itemsize * 8
        inside = (by >= 0) & (by < bits) if by.dtype.kind == "i" else by < bits
        return np.where(inside, function(x, np.where(inside, by, np.zeros((), by.dtype))), fill(x))

    return apply


def _shift_right(x, by):
    """Fills with the first bit, of unsigned integers too."""
    signed = np.dtype(f"i{x.dtype.itemsize}")
    return np.right_shift(np.ascontiguousarray(x).view(signed), np.asarray(by, signed)).view(x.dtype)


def _zero(x):
    return np.zeros((), x.dtype)


rule("shift_left")(_shift(np.left_shift, _zero))
rule("shift_right_logical")(_shift(lambda x, by: np.right_shift(_unsigned(x), _unsigned(by)).view(x.dtype), _zero))
rule("shift_right_arithmetic")(_shift(lambda x, by: _shift_right(x, by), lambda x: _shift_right(x, x.itemsize * 8 - 1)))


@rule("population_count")
def count_bits(operation: Operation, x):
    return np.bitwise_count(_unsigned(x)).astype(x.dtype)


@rule("clz")
def count_leading_zeros(operation: Operation, x):
    bits = x.dtype.itemsize * 8
    remaining, length = _unsigned(x).astype(np.uint64), np.zeros(x.shape, np.int64)
    for _ in range(bits):
        length += remaining != 0
        remaining = remaining >> np.uint64(1)
    return (bits - length).astype(x.dtype)


def _unsigned(x: ndarray) -> ndarray:
    return np.ascontiguousarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))


@rule("convert_element_type")
def convert(operation: Operation, x):
    given, dtype = operation.inputs[0], operation.dtype
    if given.weak_type and given.dtype != dtype and is_float(dtype):
        # A number of the source code. JAX rounds it while tracing, or here, depending on the axes of the mesh.
        return x.astype(dtype).astype(working_dtype(dtype))
    return convert_array(x, given.dtype, dtype)


def convert_array(x: ndarray, stored, dtype) -> ndarray:
    """Converts from one stored dtype to another as XLA does: floats saturate in integers, and NaN becomes 0."""
    target = working_dtype(dtype)
    if target == np.dtype(bool):
        return x != 0
    if not is_float(stored) and target.itemsize == 1:
        return x.astype(np.int64).astype(target)  # NumPy has no conversion between int4 and uint4
    if not is_float(stored) or is_float(dtype):
        return np.real(x).astype(target) if x.dtype.kind == "c" and target.kind != "c" else x.astype(target)
    whole = np.trunc(np.nan_to_num(np.real(x), nan=0.0, posinf=np.inf, neginf=-np.inf))
    limits = _integer_limits(target)
    inside = np.clip(whole, *limits)
    # float64 rounds the largest 64-bit integers up to the next power of two.
    beyond = whole >= limits[1]
    return np.where(beyond, np.array(limits[1], target), np.where(beyond, 0, inside).astype(target))


def _integer_limits(dtype: np.dtype) -> tuple[int, int]:
    bits = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}.get(dtype.name, dtype.itemsize * 8)
    return (0, 2**bits - 1) if "uint" in dtype.name else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@rule("bitcast_convert_type")
def bitcast(operation: Operation, x):
    stored, dtype = operation.inputs[0].dtype, operation.dtype
    bits = np.ascontiguousarray(x.astype(stored))
    narrower = np.dtype(dtype).itemsize < np.dtype(stored).itemsize
    if narrower:
        bits = bits[..., None]
    result = bits.view(dtype)
    if np.dtype(dtype).itemsize > np.dtype(stored).itemsize:
        result = result[..., 0]
    return result.astype(working_dtype(dtype))


@rule("reduce_precision")
def reduce_precision(operation: Operation, x):
    """Returns the array: in float64, precision is not reduced."""
    return x


@rule("iota")
def count_up(operation: Operation, *dynamic_sizes):
    shape, axis = operation.params["shape"], operation.params["dimension"]
    along = np.arange(shape[axis]).astype(working_dtype(operation.dtype))
    along = along.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(along, (*[1] * len(operation.mesh), *shape))


@rule("empty", "empty2")
def empty(operation: Operation, *operands):
    return np.zeros((*[1] * len(operation.mesh), *operation.shape), working_dtype(operation.dtype))


def _return_input(operation: Operation, x):
    return x


def _return_inputs(operation: Operation, *arrays):
    return arrays


rule(
    "copy", "name", "stop_gradient", "pvary", "reshard", "sharding_constraint", "layout_constraint", "to_edtype",
)(_return_input)  # fmt: skip
rule("optimization_barrier", "device_put")(_return_inputs)
# Of xmap under shardformer.legacy: moves an array to the devices of another.
rule("relocate")(lambda operation, x, like: x)
