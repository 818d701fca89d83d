"""The part of `jax.test_util` that code outside of jax uses: `JaxTestCase`, `JaxTestLoader` and two functions."""

# ruff: noqa: PT009  # this is a unittest class

import os
import re
import textwrap
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

JaxTestLoader = absltest.TestLoader

_EXACT = ("bool", "float0", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))
_TOLERANCES = dict.fromkeys(_EXACT, 0.0) | {
    "bfloat16": 1e-2,
    "float16": 1e-3,
    "float32": 1e-6,
    "float64": 1e-15,
    "complex64": 1e-6,
    "complex128": 1e-15,
}
_TYPES: dict[str, Any] = {"float0": jax.dtypes.float0, "bfloat16": jnp.bfloat16}
# Programs change it, and JaxTestCase follows.
_default_tolerance = {np.dtype(_TYPES.get(name, name)): tolerance for name, tolerance in _TOLERANCES.items()}
_TPU_TOLERANCE = 1e-3  # of float32 and complex64, which a TPU multiplies in bfloat16

device_under_test = jax.default_backend


def default_tolerance() -> dict[np.dtype, float]:
    """Returns the absolute and relative tolerance of each type on the device of the tests."""
    if device_under_test() != "tpu":
        return _default_tolerance
    return _default_tolerance | dict.fromkeys(map(np.dtype, ("float32", "complex64")), _TPU_TOLERANCE)


def cases_from_list(cases: Iterable) -> list:
    """Returns 10 cases, or $JAX_NUM_GENERATED_CASES, in an order that is the same in each run."""
    cases = list(cases)
    order = np.random.RandomState(42).permutation(len(cases))
    return [cases[number] for number in order[: int(os.getenv("JAX_NUM_GENERATED_CASES", "10"))]]


class JaxTestCase(parameterized.TestCase):
    """A test case that compares arrays, and nested dicts and sequences of them."""

    def setUp(self):
        super().setUp()
        self._rng = np.random.RandomState(zlib.adler32(self._testMethodName.encode()))

    def rng(self) -> np.random.RandomState:
        """Returns the random numbers of one test method, the same in each run."""
        return self._rng

    def assertArraysEqual(self, x, y, *, check_dtypes: bool = True, err_msg: str = ""):
        if check_dtypes:
            self.assertDtypesMatch(x, y)
        np.testing.assert_array_equal(x, y, err_msg=err_msg)

    def assertArraysAllClose(self, x, y, *, check_dtypes: bool = True, atol=None, rtol=None, err_msg: str = ""):
        """Compares two arrays; a tolerance is a number, a dict by types, or the type's own."""
        self.assertEqual(x.shape, y.shape)
        if check_dtypes:
            self.assertDtypesMatch(x, y)
        atol = max(_tolerance(x, atol), _tolerance(y, atol))
        rtol = max(_tolerance(x, rtol), _tolerance(y, rtol)) or 1e-7  # numpy's instead of 0
        x, y = _without_bfloat16(x), _without_bfloat16(y)
        np.testing.assert_allclose(x, y, atol=atol, rtol=rtol, err_msg=err_msg)

    def assertDtypesMatch(self, x, y, *, canonicalize_dtypes: bool = True):
        convert = jax.dtypes.canonicalize_dtype if canonicalize_dtypes else np.dtype
        self.assertEqual(convert(_dtype(x)), convert(_dtype(y)))

    def assertAllClose(
        self, x, y, *, check_dtypes: bool = True, atol=None, rtol=None,
        canonicalize_dtypes: bool = True, err_msg: str = "",
    ):  # fmt: skip
        """Compares arrays, scalars, and dicts and sequences of them."""
        options: dict[str, Any] = {"check_dtypes": check_dtypes, "atol": atol, "rtol": rtol}
        options |= {"canonicalize_dtypes": canonicalize_dtypes, "err_msg": err_msg}
        if isinstance(x, dict):
            self.assertIsInstance(y, dict)
            self.assertEqual(set(x), set(y))
            for key in x:
                self.assertAllClose(x[key], y[key], **options)
        elif _is_array(x):
            self.assertTrue(_is_array(y))
            if check_dtypes:
                self.assertDtypesMatch(x, y, canonicalize_dtypes=canonicalize_dtypes)
            arrays = np.asarray(x), np.asarray(y)
            self.assertArraysAllClose(*arrays, check_dtypes=False, atol=atol, rtol=rtol, err_msg=err_msg)
        elif isinstance(x, list | tuple):
            self.assertIsInstance(y, list | tuple)
            self.assertEqual(len(x), len(y))
            for ours, theirs in zip(x, y, strict=True):
                self.assertAllClose(ours, theirs, **options)
        elif x != y:
            raise TypeError((type(x), type(y)))

    def assertMultiLineStrippedEqual(self, expected: str, what: str):
        """Compares strings without their indents."""
        clean = [re.sub(r"\s*\n\s*", "\n", textwrap.dedent(text).strip()) for text in (expected, what)]
        self.assertMultiLineEqual(*clean)


def _is_array(x) -> bool:
    return hasattr(x, "__array__") or np.isscalar(x)


def _dtype(x) -> np.dtype:
    return np.dtype(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


def _tolerance(array, given) -> float:
    if given is not None and not isinstance(given, dict):
        return given
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return {np.dtype(key): value for key, value in (given or {}).items()}.get(
        dtype, default_tolerance().get(dtype, 0.0)
    )


def _without_bfloat16(x) -> np.ndarray:
    return np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x)
