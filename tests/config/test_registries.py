"""Values of keys that are registered functions: their names, found without an import, and what they ask for."""

import inspect

import pytest

from shardformer.cli.help import format_command
from shardformer.config import FIELDS, Config, parsing, registries
from shardformer.errors import UsageError
from shardformer.kernels.activations import ACTIVATIONS
from shardformer.optim.optimizers import OPTIMIZERS
from shardformer.optim.schedule import SCHEDULES
from shardformer.shards.norm import NORMS
from shardformer.shards.positions import POSITIONS

REGISTRIES = {
    "activation": ACTIVATIONS,
    "norm": NORMS,
    "positions": POSITIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_file_has_the_registered_functions(name):
    """What is read from the text is what an import registers."""
    found = registries.read_parameters(FIELDS[name].metadata["registry"])
    assert found == {each: tuple(inspect.signature(f).parameters) for each, f in REGISTRIES[name].items()}
    assert parsing.choices(FIELDS[name]) == tuple(found)


@pytest.mark.parametrize("name", REGISTRIES)
def test_help_and_messages_list_the_registered_names(name):
    listed = "".join(format_command("train").split())
    assert f"{name}={FIELDS[name].default}{'|'.join(REGISTRIES[name])}" in listed
    with pytest.raises(UsageError, match=f"{name} is one of {', '.join(REGISTRIES[name])}"):
        Config.of(**{name: "other"})


def test_only_marked_functions_are_values(tmp_path):
    file = tmp_path / "shapes.py"
    file.write_text(
        "SHAPES = Registry()\n\n"
        "@SHAPES.register\n@jit\ndef square(size, *, unit=1): ...\n\n"
        "@jit\ndef helper(size): ...\n\n"
        "class Circle:\n    @SHAPES.register\n    def method(self): ...\n"
    )
    assert registries.read_parameters(str(file)) == {"square": ("size",)}
    assert registries.asks_for(str(file), "square", "size")
    assert not registries.asks_for(str(file), "square", "unit")
    assert not registries.asks_for(str(file), "helper", "size")


@pytest.fixture
def activations(monkeypatch):
    """The activations, without what a test registers afterwards."""
    monkeypatch.setattr(registries, "ADDED", {})
    monkeypatch.setitem(ACTIVATIONS, "cube", None)  # which removes it after the test
    del ACTIVATIONS["cube"]
    return ACTIVATIONS


def test_function_of_a_program_is_a_value_from_then_on(activations):
    def cube(x): ...

    with pytest.raises(UsageError, match=r"activation is one of gelu, .*; got 'cube'"):
        Config.of(activation="cube")
    assert activations.register(cube) is cube
    assert Config.of(activation="cube").get("activation") == "cube"
    assert activations["cube"] is cube
    assert not Config.of(activation="cube").model.gated


def test_definition_may_run_again_but_not_change(activations):
    """Models may have been traced with the first one: their shapes and programs are kept by the name."""

    def define():
        def cube(x): ...

        return cube

    def gated(x, gate): ...

    gated.__name__ = "cube"
    activations.register(define())
    activations.register(define())
    with pytest.raises(UsageError, match="cube is registered already, with other code"):
        activations.register(gated)
    assert not Config.of(activation="cube").model.gated


def test_function_of_the_package_is_not_replaced(activations):
    def gelu(x): ...

    before = activations["gelu"]
    with pytest.raises(UsageError, match="gelu is a function of this package already; give yours another name"):
        activations.register(gelu)
    assert activations["gelu"] is before


@pytest.mark.parametrize("value", ["mine.py:lion", "~/a b/mine.py:lion", "/x/y.py:f"])
def test_code_has_no_name_in_a_run(value):
    assert registries.without_code(value) == "own"


@pytest.mark.parametrize("value", ["adamw", "own", "mine.py", "mine.py:", "mine.txt:lion", "mine.py:a.b", "", 3, None])
def test_other_values_are_not_code(value):
    assert registries.without_code(value) is value


def test_function_gets_what_its_parameters_name():
    def area(width, height=2):
        return width * height

    assert registries.call_with(area, {"width": 3, "depth": 5}) == 6
    assert registries.call_with(area, {"width": 3, "height": 4}) == 12
