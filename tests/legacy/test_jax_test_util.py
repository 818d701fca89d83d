"""JaxTestCase, which tests of other projects inherit: each assertion passes, and fails, where jax 0.4.13's did."""

import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import legacy

ONE = np.float32(1)


def test_cases_and_tolerances_are_those_of_jax_0_2(monkeypatch):
    with legacy.installed():
        from jax.test_util import cases_from_list, default_tolerance

        assert cases_from_list(range(14)) == [9, 11, 0, 12, 5, 8, 2, 1, 13, 4]  # np.random.RandomState(42).permutation
        assert sorted(cases_from_list("abc")) == ["a", "b", "c"]
        monkeypatch.setenv("JAX_NUM_GENERATED_CASES", "2")
        assert cases_from_list(range(14)) == [9, 11]
        tolerances = default_tolerance()
        assert len(tolerances) == 16
        assert tolerances[np.dtype("float32")] == tolerances[np.dtype("complex64")] == 1e-6
        assert tolerances[np.dtype(jnp.bfloat16)] == 1e-2
        assert tolerances[np.dtype("int64")] == tolerances[np.dtype("bool")] == 0


@pytest.fixture(scope="module")
def case():
    with legacy.installed():
        from jax.test_util import JaxTestCase, JaxTestLoader

        class Case(JaxTestCase):
            def test_draw(self):
                """Draws nothing: its name is what the random numbers depend on."""

        assert JaxTestLoader().getTestCaseNames(Case) == ["test_draw"]
        yield Case("test_draw")


@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        ("assertAllClose", (ONE, 1 + ONE * 1e-6), (ONE, 1 + ONE * 3e-6)),
        ("assertAllClose", ({"a": [ONE, 2.0]}, {"a": (jnp.ones(()), 2.0)}), ({"a": [ONE]}, {"a": [ONE, ONE]})),
        ("assertAllClose", (1.0, ONE), (1, ONE)),
        ("assertAllClose", (None, None), ({"a": ONE}, {"b": ONE})),
        ("assertArraysAllClose", (jnp.ones(2, "bfloat16"), jnp.full(2, 1.01, "bfloat16")),
         (jnp.ones(2, "bfloat16"), jnp.full(2, 1.04, "bfloat16"))),
        ("assertArraysAllClose", (np.arange(2), np.arange(2)), (np.arange(2), np.arange(2)[None])),
        ("assertArraysEqual", (np.ones(2), jnp.ones(2)), (np.ones(2), np.ones(2, int))),
        ("assertDtypesMatch", (np.float64(1), ONE), (np.int64(1), ONE)),
        ("assertMultiLineStrippedEqual", ("a\n  b", "  a\nb\n"), ("a\nb", "a b")),
    ],
)  # fmt: skip
def test_an_assertion_passes_and_fails(case, call, good, bad):
    getattr(case, call)(*good)
    with pytest.raises(AssertionError):
        getattr(case, call)(*bad)


def test_given_tolerances_are_used(case):
    case.assertAllClose(ONE, 1 + ONE * 1e-3, atol=2e-3)
    case.assertAllClose(ONE, 1 + ONE * 1e-3, rtol={np.float32: 2e-3})
    with pytest.raises(AssertionError):
        case.assertAllClose(ONE, 1 + ONE * 1e-3, rtol={np.float64: 2e-3})


def test_tolerance_that_a_program_changes_is_used(case, monkeypatch):
    from shardformer.legacy import jax_test_util

    with pytest.raises(AssertionError):
        case.assertAllClose(ONE, 1 + ONE * 1e-3)
    monkeypatch.setitem(jax_test_util._default_tolerance, np.dtype("float32"), 2e-3)  # as jax_md's tests do
    case.assertAllClose(ONE, 1 + ONE * 1e-3)


def test_random_numbers_depend_on_the_method_only(case):
    case.setUp()
    draws = np.random.RandomState(320603086)  # the Adler-32 sum of "test_draw"
    assert case.rng().randint(1000) == draws.randint(1000)
