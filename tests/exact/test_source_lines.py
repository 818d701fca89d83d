"""Operations are traced back to the user's lines, not to JAX's, Haiku's or Python's own."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer.exact import jaxprs, source_lines

THIS = "tests/exact/test_source_lines.py"


def find_first_line(code: str) -> int:
    """Returns the number of this file's first line that has the code."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if code in line)


def take_softmax(x):
    return jax.nn.softmax(x)  # the line of the softmax


def take_softmax_twice(x):
    return take_softmax(take_softmax(x))  # the line of both calls


def find_equation(function, name, *arguments):
    """Returns the first operation of this name in a traced function."""
    closed = jax.make_jaxpr(function)(*arguments)
    return next(e for inner in jaxprs.walk(closed.jaxpr) for e in inner.eqns if e.primitive.name == name)


X = np.ones(3, np.float32)


def test_line_is_the_users_not_jaxs():
    equation = find_equation(take_softmax, "exp", X)
    line = find_first_line("# the line of the softmax")
    assert source_lines.find_line(equation) == f"{THIS}:{line} (take_softmax)"


def test_calls_are_innermost_first():
    calls = source_lines.find_calls(find_equation(take_softmax_twice, "exp", X))
    first, second = find_first_line("# the line of the softmax"), find_first_line("# the line of both calls")
    assert calls[:2] == (f"{THIS}:{first} (take_softmax)", f"{THIS}:{second} (take_softmax_twice)")
    assert source_lines.describe_calls(calls[:2]) == f"{calls[0]}, called from {calls[1]}"


def test_positions_tell_two_calls_of_a_line_apart():
    closed = jax.make_jaxpr(take_softmax_twice)(X)
    found = [e for inner in jaxprs.walk(closed.jaxpr) for e in inner.eqns if e.primitive.name == "exp"]
    assert len(found) == 2
    assert len({source_lines.find_calls(e) for e in found}) == 1
    assert len({source_lines.find_positions(e) for e in found}) == 2


def use_haiku(x):
    return hk.Linear(2)(x)  # the line of the layer


def use_optax(x):
    return optax.softmax_cross_entropy(x, x)  # the line of the loss


def use_functools(x):
    return functools.reduce(jnp.add, [x, x])  # the line of the sum


def use_compiled(x):
    return eval("x * x")  # the line of the product


@pytest.mark.parametrize(
    ("function", "name", "code"),
    [
        (lambda x: hk.transform(use_haiku).init(jax.random.key(0), x), "dot_general", "# the line of the layer"),
        (use_optax, "mul", "# the line of the loss"),
        (use_functools, "add", "# the line of the sum"),
        (use_compiled, "mul", "# the line of the product"),
    ],
    ids=["haiku", "optax", "functools", "eval"],
)
def test_libraries_are_left_out(function, name, code):
    line = source_lines.find_line(find_equation(function, name, X))
    assert line.startswith(f"{THIS}:{find_first_line(code)} (use_")


def test_line_of_a_loop_body_is_inside_of_it():
    def body(x, _):
        return jnp.sin(x), None  # the line of the body

    equation = find_equation(lambda x: jax.lax.scan(body, x, None, length=2), "sin", X)
    line = find_first_line("# the line of the body")
    assert source_lines.find_line(equation) == f"{THIS}:{line} (test_line_of_a_loop_body_is_inside_of_it.<locals>.body)"


def test_line_of_a_gradient_is_the_forward_one():
    equation = find_equation(jax.grad(lambda x: take_softmax(x)[0]), "exp", X)
    assert source_lines.find_line(equation).startswith(f"{THIS}:{find_first_line('# the line of the softmax')} ")


def test_line_without_a_traceback_is_unknown():
    equation = find_equation(jnp.sin, "sin", X)
    assert source_lines.find_line(equation.replace(source_info=equation.source_info.replace(traceback=None))) == "?"
    assert source_lines.describe_calls(()) == "?"


def test_wrong_list_of_libraries_is_noticed(monkeypatch):
    monkeypatch.setattr(source_lines, "LIBRARIES", ())
    monkeypatch.setattr(source_lines, "_find_calls", source_lines._find_calls.__wrapped__)  # without its cache
    assert "jax/" in source_lines.find_line(find_equation(take_softmax, "exp", X))
