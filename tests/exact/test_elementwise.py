"""Operations on elements are XLA's: integers, booleans and bits exactly, floats within the rounding of float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer.exact import elementwise
from tests.exact.comparison import (
    Comparison,
    bits,
    booleans,
    case,
    find_unnoticed,
    floats,
    integers,
    rules_of,
    shuffled,
)

INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
SOME_INTEGERS = (np.int8, np.int32, np.uint16, np.uint64)  # each size and both signs, as compiling each pair takes long
NAN, INF = float("nan"), float("inf")
SPECIAL = shuffled(NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, -0.5, 1.5, -1.5, 0.49999999999999994, 1e300, 7)
# float64 has no exact 2^63 - 1; numbers at the ends of the ranges of all integers
ENDS = shuffled(
    NAN, INF, -INF, -0.0, 0.9, -0.9, 127.5, 128, -128.9, -129, 255.9, 256, 32767.5, -32769, 65536, 2**31 - 0.5, 2**31,
    -(2**31) - 1, 2**32, 2**32 - 1, 2.0**63, -(2.0**63), 2.0**64, 2.0**53 + 2, 1e38, -1e38, 7.5, -7.5, 6, -9, 3,
)  # fmt: skip

RANGES = {"any": (-3, 3), "positive": (1.1, 5), "below 1": (-0.9, 0.9)}
UNARY = {
    "any": "abs neg sign square is_finite exp exp2 expm1 sqrt rsqrt cbrt logistic tanh sin cos tan sinh cosh atan "
    "asinh floor ceil erf erfc bessel_i0e bessel_i1e",
    "positive": "log log1p acosh lgamma digamma",
    "below 1": "asin acos atanh erf_inv",
}
BINARY = (
    "add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "eq", "ne", "ge", "gt", "le", "lt",
)  # fmt: skip
OF_INTEGERS = (
    "add", "sub", "mul", "div", "rem", "max", "min", "eq", "ne", "ge", "gt", "le", "lt", "bitwise_and", "bitwise_or",
    "bitwise_xor", "shift_left", "shift_right_arithmetic", "shift_right_logical",
)  # fmt: skip
IN_TOTAL_ORDER = "eq_to", "le_to", "lt_to"


def list_cases():
    cases = {}
    for kind, names in UNARY.items():
        for name in names.split():
            cases[name] = case(getattr(lax, name), floats(7, low=RANGES[kind][0], high=RANGES[kind][1]))
            if name not in ("erf_inv", "lgamma", "digamma"):  # outside of their domain they differ in sign or NaN
                cases[f"{name} of special numbers"] = case(getattr(lax, name), SPECIAL)
    for name in BINARY:
        cases[name] = case(getattr(lax, name), floats(3, 5), floats(3, 5))
        cases[f"{name} of special numbers"] = case(getattr(lax, name), SPECIAL, SPECIAL)
    for name in IN_TOTAL_ORDER:
        cases[name] = case(getattr(lax, f"{name}_p").bind, SPECIAL, SPECIAL)
    if hasattr(lax, "polynomial"):  # JAX 0.12
        cases["polynomial"] = case(lambda x, c: lax.polynomial(x, (c, c, 2.0)), floats(5), floats())
        cases["log2"] = case(lax.log2, SPECIAL)
        cases["gradient of tanh"] = case(jax.vmap(jax.grad(lax.tanh)), floats(5))
    cases |= list_integer_cases() | list_conversions() | list_bitcasts() | list_other_cases()
    return cases


def list_integer_cases():
    cases = {}
    for dtype in SOME_INTEGERS:
        kind = np.dtype(dtype).name
        shifts = integers(40, low=0, high=np.dtype(dtype).itemsize * 8 + 3, dtype=dtype)
        for name in OF_INTEGERS:
            second = shifts if name.startswith("shift") else bits(40, dtype=dtype)
            cases[f"{name} {kind}"] = case(getattr(lax, name), bits(40, dtype=dtype), second)
        small = integers(40, low=-3 * (kind[0] == "i"), dtype=dtype)
        for name in "div", "rem":
            cases[f"{name} {kind} small"] = case(getattr(lax, name), small, small)
        for name in "neg", "sign", "bitwise_not", "population_count", "clz", "square", "abs":
            if name != "abs" or kind[0] == "i":
                cases[f"{name} {kind}"] = case(getattr(lax, name), bits(40, dtype=dtype))
        for y in 0, 1, 2, 3, 5:
            cases[f"integer_pow {y} {kind}"] = case(functools.partial(lax.integer_pow, y=y), bits(40, dtype=dtype))
        cases[f"clamp {kind}"] = case(lax.clamp, *[bits(40, dtype=dtype)] * 3)
        cases[f"shift beyond {kind}"] = case(lax.shift_left, bits(40, dtype=dtype), bits(40, dtype=dtype))
        cases[f"shift_right beyond {kind}"] = case(
            lax.shift_right_arithmetic, bits(40, dtype=dtype), bits(40, dtype=dtype)
        )
    for name in "bitwise_and", "bitwise_or", "bitwise_xor", "eq", "ne", "max", "min", "lt", "ge":
        cases[f"{name} bool"] = case(getattr(lax, name), booleans(20), booleans(20))
    cases["bitwise_not bool"] = case(lax.bitwise_not, booleans(5))
    return cases


def list_conversions():
    types = (*INTEGERS, bool, np.float32, np.float64, jnp.int4, jnp.uint4)
    cases = {}
    for dtype in types:
        name = np.dtype(dtype).name
        convert = functools.partial(lax.convert_element_type, new_dtype=dtype)
        cases[f"float64 to {name}"] = case(convert, ENDS if dtype != np.float32 else floats(9), most=1e-6)
        cases[f"float32 to {name}"] = case(convert, lambda random: ENDS(random).astype(np.float32))
        for given in (*SOME_INTEGERS, bool, jnp.int4, jnp.uint4):
            if given in (bool, jnp.int4, jnp.uint4):
                draw = integers(20, low=0, high=7, dtype=given)
            else:
                draw = bits(20, dtype=given)
            cases[f"{np.dtype(given).name} to {name}"] = case(convert, draw, most=1e-6)
    return cases


def list_bitcasts():
    types = (*SOME_INTEGERS, np.float32, np.float64)
    cases = {}
    for given in types:
        for dtype in types:
            ratio = np.dtype(dtype).itemsize // np.dtype(given).itemsize
            shape = (3, ratio) if ratio > 1 else (3, 4)
            # All bits of a float: whole numbers have few; arbitrary bits might be a NaN, whose bits are not kept.
            draw = floats(*shape, dtype=given) if given in (np.float32, np.float64) else integers(
                *shape, low=0, high=100, dtype=given)  # fmt: skip
            name = f"bitcast {np.dtype(given).name} to {np.dtype(dtype).name}"
            cases[name] = case(functools.partial(lax.bitcast_convert_type, new_dtype=dtype), draw)
    return cases


def list_other_cases():
    complex_pair = floats(4), floats(4)
    return {
        "integer_pow": case(lambda x: [lax.integer_pow(x, y) for y in (-3, -1, 0, 1, 2, 7)], floats(6)),
        "pow of an integer": case(lambda x, y: lax.pow(x, y), floats(6), integers(6)),
        "round": case(lambda x: [lax.round(x, method) for method in lax.RoundingMethod.__members__.values()], SPECIAL),
        "clamp": case(lax.clamp, SPECIAL, SPECIAL, SPECIAL),
        "clamp by scalars": case(lambda low, x: lax.clamp(low, x, 1.5), floats(), floats(3, 4)),
        "select_n": case(lambda which, a, b: lax.select_n(which, a, b), booleans(5), floats(5), floats(5)),
        "select_n by a scalar": case(lambda which, a, b: lax.select_n(which, a, b), booleans(), floats(5), floats(5)),
        "select_n of three": case(
            lambda which, *cases: lax.select_n(which, *cases), integers(9, low=0, high=2), *[bits(9)] * 3
        ),
        "igamma": case(lax.igamma, floats(6, low=0.5), floats(6, low=0.5)),
        "igammac": case(lax.igammac, floats(6, low=0.5), floats(6, low=0.5)),
        "betainc": case(lax.betainc, *[floats(6, low=0.5)] * 2, floats(6, low=0.1, high=0.9)),
        "zeta": case(lax.zeta, floats(6, low=1.5), floats(6, low=0.5)),
        "polygamma": case(lax.polygamma, shuffled(1, 2, 3), floats(3, low=0.5)),
        "complex": case(lambda a, b: (lax.complex(a, b), lax.conj(lax.complex(a, b))), *complex_pair),
        "parts of complex": case(
            lambda a, b: (lax.real(lax.complex(a, b)), lax.imag(lax.complex(a, b))), *complex_pair
        ),
        "products of complex": case(
            lambda a, b: [f(lax.complex(a, b), lax.complex(b, b)) for f in (lax.mul, lax.div, lax.add, lax.pow)],
            *complex_pair,
        ),
        "functions of complex": case(
            lambda a, b: [f(lax.complex(a, b)) for f in (lax.abs, lax.sign, lax.exp, lax.log, lax.sqrt, lax.tanh)],
            *complex_pair,
        ),
        "reduce_precision to float64": case(lambda x: lax.reduce_precision(x, 11, 52), floats(5)),
        "iota": case(
            lambda x: [
                lax.broadcasted_iota(dtype, (2, 3, 4), axis) + x.astype(dtype)
                for dtype in (*INTEGERS, np.float32, jnp.int4)
                for axis in range(3)
            ],
            integers(low=0, high=1),
        ),
        "empty": case(
            lambda x: lax.full_like(lax.empty((2, 3), np.float32), 1) + x, floats(dtype=np.float32), most=1e-6
        ),
        "copies": case(
            lambda x: [lax.optimization_barrier(x), lax.stop_gradient(x), jnp.copy(x), jax.device_put(x)], floats(3)
        ),
        "sum of gradients": case(jax.grad(lambda x: x * x), floats()),
        "named": case(lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"), floats(3)),
    }


@pytest.fixture(scope="module")
def compared():
    return Comparison(list_cases())


@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_rules_are_those_of_xla(compared, where):
    assert not list(compared.list_differences(where))


def test_each_wrong_rule_is_noticed(compared):
    arbitrary = {"empty", "empty2"}
    assert not find_unnoticed(compared, (rules_of(elementwise) & compared.operations) - arbitrary)


# Rules that test_interpreter.py reaches, as they need a mesh, and those of other releases of JAX.
ELSEWHERE = {"pvary", "reshard", "sharding_constraint", "layout_constraint"}
ELSEWHERE |= {"to_edtype", "empty2"}  # XLA's own programs only
ELSEWHERE |= {"relocate"}  # of xmap, in test_repairs.py
ELSEWHERE |= {"log2", "one_minus_square", "polynomial"}  # JAX 0.12
ELSEWHERE |= {"name"}  # a primitive of primitives with JAX_REMAT3, which JAX expands


def test_each_rule_has_a_case(compared):
    assert rules_of(elementwise) - compared.operations <= ELSEWHERE
