"""Products, convolutions and factorisations are XLA's, and so are their gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer.exact import products
from tests.exact.comparison import Comparison, bits, case, find_unnoticed, floats, integers, rules_of


def list_cases():
    return list_dots() | list_ragged_dots() | list_convolutions() | list_factorisations()


DOTS = {  # shapes, (contracted axes), (batch axes)
    "matrices": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "transposed": ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    "vectors": ((6,), (6,), (((0,), (0,)), ((), ()))),
    "outer": ((3,), (2, 4), (((), ()), ((), ()))),
    "batch": ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    "batch last": ((3, 4, 2), (5, 2, 4), (((1,), (2,)), ((2,), (1,)))),
    "two batches": ((2, 3, 4, 5), (3, 2, 6, 5), (((3,), (3,)), ((0, 1), (1, 0)))),
    "two contracted": ((2, 3, 4), (4, 5, 2), (((0, 2), (2, 0)), ((), ()))),
    "all contracted": ((2, 3), (2, 3), (((0, 1), (0, 1)), ((), ()))),
    "batch only": ((2, 3), (2, 3), (((), ()), ((0, 1), (0, 1)))),
    "nothing to sum": ((3, 0), (0, 4), (((1,), (0,)), ((), ()))),
    "scalars": ((), (2,), (((), ()), ((), ()))),
}


def list_dots():
    cases = {}
    for name, (a, b, numbers) in DOTS.items():
        dot = functools.partial(lax.dot_general, dimension_numbers=numbers)
        cases[f"dot {name}"] = case(dot, floats(*a), floats(*b))
        gradient = jax.grad(lambda a, b, dot=dot: jnp.sin(dot(a, b)).sum(), (0, 1))
        cases[f"gradient of dot {name}"] = case(gradient, floats(*a), floats(*b))
    dot = DOTS["two contracted"]
    for dtype, result in itertools.product((np.int8, np.int16, np.int32, np.uint8, np.uint32), (None, np.int32)):
        product = functools.partial(lax.dot_general, dimension_numbers=dot[2], preferred_element_type=result)
        name = f"dot of {np.dtype(dtype)} to {result and np.dtype(result)}"
        if result is None or np.dtype(dtype).itemsize < 4:
            cases[name] = case(product, bits(*dot[0], dtype=dtype), bits(*dot[1], dtype=dtype))
    mixed = functools.partial(lax.dot_general, dimension_numbers=dot[2], preferred_element_type=np.int32)
    cases["dot of int8 and uint8"] = case(mixed, bits(*dot[0], dtype=np.int8), bits(*dot[1], dtype=np.uint8))
    cases["dot of 64-bit integers"] = case(jnp.dot, bits(3, 4, dtype=np.int64), bits(4, 2, dtype=np.int64))
    cases["dot of bfloat16 to float32"] = case(
        functools.partial(lax.dot, preferred_element_type=np.float32), floats(3, 4, dtype=jnp.bfloat16),
        floats(4, 5, dtype=jnp.bfloat16), most=1e-5,
    )  # fmt: skip
    return cases


def list_ragged_dots():
    sizes = lambda random: np.diff(np.sort(random.randint(0, 7, 2)), prepend=0, append=6).astype(np.int32)  # noqa: E731
    short = lambda random: np.array([2, 0, 1], np.int32)  # noqa: E731
    gradient = jax.grad(lambda a, b, sizes: jnp.sin(lax.ragged_dot(a, b, sizes)).sum(), (0, 1))
    return {
        "ragged_dot": case(lax.ragged_dot, floats(6, 4), floats(3, 4, 5), sizes),
        "ragged_dot of fewer rows": case(lax.ragged_dot, floats(6, 4), floats(3, 4, 5), short),
        "gradient of ragged_dot": case(gradient, floats(6, 4), floats(3, 4, 5), sizes),
    }


# shapes of x [N, C, space] and of the kernel [O, I, space], and options
CONVOLUTIONS = {
    "plain": ((2, 3, 6, 7), (4, 3, 3, 2), {}),
    "strides": ((2, 3, 9, 8), (4, 3, 3, 2), {"window_strides": (2, 3)}),
    "same": ((2, 3, 9, 8), (4, 3, 3, 2), {"padding": "SAME", "window_strides": (2, 1)}),
    "padding": ((2, 3, 6, 7), (4, 3, 3, 2), {"padding": [(2, -1), (-2, 3)]}),
    "dilation": ((1, 2, 6, 7), (3, 2, 3, 2), {"lhs_dilation": (2, 3), "rhs_dilation": (2, 2)}),
    "all": ((2, 4, 6, 7), (6, 2, 3, 2), {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2), "window_strides": (2, 3),
            "padding": [(1, 2), (0, 3)], "feature_group_count": 2}),
    "groups": ((2, 6, 5), (4, 3, 2), {"feature_group_count": 2}),
    "depthwise": ((2, 3, 5, 5), (6, 1, 2, 2), {"feature_group_count": 3}),
    "batch groups": ((4, 3, 5), (6, 3, 2), {"batch_group_count": 2}),
    "one axis": ((2, 3, 8), (4, 3, 3), {"padding": "VALID"}),
    "no axis": ((2, 3), (4, 3), {}),
    "too small": ((2, 3, 2), (4, 3, 5), {}),
    "three axes": ((1, 2, 4, 3, 5), (2, 2, 2, 2, 2), {"window_strides": (2, 1, 2)}),
}  # fmt: skip
LAYOUTS = ("NHWC", "HWIO", "NHWC"), ("CHWN", "OHWI", "HNWC")


def list_convolutions():
    cases = {}
    for name, (x, kernel, given) in CONVOLUTIONS.items():
        options = {"window_strides": (1,) * (len(x) - 2), "padding": [(0, 0)] * (len(x) - 2)} | given
        convolve = functools.partial(lax.conv_general_dilated, **options)
        cases[f"convolution {name}"] = case(convolve, floats(*x), floats(*kernel))
        gradient = jax.grad(lambda x, w, convolve=convolve: jnp.sin(convolve(x, w)).sum(), (0, 1))
        if name not in ("no axis", "too small"):
            cases[f"gradient of convolution {name}"] = case(gradient, floats(*x), floats(*kernel))
    for layout in LAYOUTS:
        sizes = {"N": 2, "C": 3, "I": 3, "O": 4, "H": 6, "W": 5}
        convolve = functools.partial(
            lax.conv_general_dilated, window_strides=(1, 2), padding="SAME", dimension_numbers=layout
        )
        x, kernel = [sizes[axis] for axis in layout[0]], [sizes[axis] for axis in layout[1]]
        cases[f"convolution {layout}"] = case(convolve, floats(*x), floats(*kernel))
    whole = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="VALID")
    cases["convolution of integers"] = case(whole, integers(2, 3, 6), integers(4, 3, 2))
    cases["convolution of int8 to int32"] = case(
        functools.partial(whole, preferred_element_type=np.int32), bits(2, 3, 6, dtype=np.int8),
        bits(4, 3, 2, dtype=np.int8),
    )  # fmt: skip
    cases["vmapped convolution"] = case(jax.vmap(whole, (0, 1)), floats(2, 2, 3, 6), floats(4, 2, 3, 2))
    cases["transposed convolution"] = case(
        lambda x, w: lax.conv_transpose(x, w, (2, 3), "SAME"), floats(2, 4, 5, 3), floats(3, 3, 3, 4)
    )
    return cases


def list_factorisations():
    def positive(a):
        return a @ jnp.swapaxes(a, -1, -2) + jnp.eye(a.shape[-1])[None]

    def without_signs(a, b, c):
        return jnp.abs(a), jnp.abs(b), jnp.abs(c)

    square = floats(2, 4, 4)
    cases = {
        "cholesky": case(lambda a: lax.linalg.cholesky(positive(a)), square),
        "cholesky of a triangle": case(
            lambda a: lax.linalg.cholesky(jnp.tril(positive(a)), symmetrize_input=False), square
        ),
        "cholesky of no positive matrix": case(lambda a: lax.linalg.cholesky(-positive(a)), square),
        "gradient of cholesky": case(jax.grad(lambda a: jnp.sin(lax.linalg.cholesky(positive(a))).sum()), square),
        "eigh": case(lambda a: lax.linalg.eigh(positive(a))[1], square, most=1e-10),
        "vectors of eigh": case(lambda a: jnp.abs(lax.linalg.eigh(positive(a))[0]), square, most=1e-9),
        "svd": case(lambda a: lax.linalg.svd(a, compute_uv=False), floats(2, 3, 4), most=1e-10),
        "vectors of svd": case(
            lambda a: without_signs(*lax.linalg.svd(a, full_matrices=False)), floats(2, 3, 4), most=1e-9
        ),
        "qr": case(lambda a: [abs(x) for x in jnp.linalg.qr(a)], floats(2, 4, 3), most=1e-10),
        "full qr": case(lambda a: [abs(x) for x in jnp.linalg.qr(a, "complete")], floats(2, 4, 2), most=1e-10),
        "lu": case(lax.linalg.lu, floats(2, 4, 4)),
        "lu of more rows": case(lax.linalg.lu, floats(5, 3)),
        "determinant": case(jnp.linalg.det, square, most=1e-10),
        "solve": case(lambda a, b: jnp.linalg.solve(a, b), square, floats(2, 4, 3), most=1e-10),
        "gradient of inverse": case(jax.grad(lambda a: jnp.sin(jnp.linalg.inv(a)).sum()), floats(3, 3), most=1e-9),
        "fft": case(
            lambda a, b: [jnp.fft.fft(lax.complex(a, b)), jnp.fft.ifft2(lax.complex(a, b))], floats(3, 8), floats(3, 8)
        ),
        "rfft": case(lambda a: [jnp.fft.rfft(a), jnp.fft.rfft(a, 7), jnp.fft.rfft2(a)], floats(3, 8)),
        "irfft": case(lambda a: [jnp.fft.irfft(jnp.fft.rfft(a)), jnp.fft.irfft(jnp.fft.rfft(a), 9)], floats(3, 8)),
    }  # fmt: skip
    for left, lower, transposed in itertools.product((True, False), repeat=3):
        unit = left ^ lower ^ transposed
        solve = functools.partial(
            lax.linalg.triangular_solve, left_side=left, lower=lower, transpose_a=transposed, unit_diagonal=unit
        )
        b = floats(2, 4, 3) if left else floats(2, 3, 4)
        cases[f"triangular_solve {left, lower, transposed, unit}"] = case(
            lambda a, b, solve=solve: solve(a + 4 * jnp.eye(4)[None], b), square, b, most=1e-10
        )
    return cases


@pytest.fixture(scope="module")
def compared():
    return Comparison(list_cases())


@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_products_are_those_of_xla(compared, where):
    assert not list(compared.list_differences(where))


def test_each_wrong_rule_is_noticed(compared):
    assert not find_unnoticed(compared, rules_of(products))


def test_each_rule_has_a_case(compared):
    assert rules_of(products) <= compared.operations
