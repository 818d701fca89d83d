"""A program that a thread has compiled is called without another compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.devices import programs
from shardformer.devices.early_compilation import EarlyCompilation, saves_time
from shardformer.errors import UsageError
from tests.surroundings import counting_compilations


def compile_in_thread(program, *arguments):
    EarlyCompilation(lambda: program.lower(*arguments).compile()).wait()


def make_arguments(sharding):
    placed = jax.make_array_from_callback((8,), sharding, np.arange(8, dtype=np.float32).__getitem__)
    return jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding), placed


def test_first_call_finds_the_compiled_program():
    mesh = jax.make_mesh((2,), ("dp",))
    abstract, placed = make_arguments(jax.NamedSharding(mesh, jax.P("dp")))

    def double(x, step):
        return x * 2 + step

    program = jax.jit(double, donate_argnums=0, out_shardings=abstract.sharding)
    with counting_compilations() as compiled:
        compile_in_thread(program, abstract, np.float32(0))
        result = program(placed, np.float32(1))
    assert np.asarray(result)[3] == 7
    assert compiled["jit(double)"] == 1


def test_other_shardings_are_compiled_by_the_call():
    mesh = jax.make_mesh((2,), ("dp",))
    abstract, _ = make_arguments(jax.NamedSharding(mesh, jax.P("dp")))
    _, placed = make_arguments(jax.NamedSharding(mesh, jax.P()))

    def triple(x):
        return x * 3

    program = jax.jit(triple)
    with counting_compilations() as compiled:
        compile_in_thread(program, abstract)
        result = program(placed)
    assert np.asarray(result)[3] == 9
    assert compiled["jit(triple)"] == 2


def test_failure_in_the_thread_is_left_to_the_call():
    def fail(x):
        raise UsageError("wrong")

    program = jax.jit(fail)
    compile_in_thread(program, 1.0)
    with pytest.raises(UsageError, match="wrong"):
        program(1.0)


def test_no_thread_on_one_core_or_with_a_store(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert saves_time()
    monkeypatch.setattr(programs, "_store", object())
    assert not saves_time()
    monkeypatch.setattr(programs, "_store", None)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert not saves_time()
