"""The names that `shardformer` exports: none vanishes in silence, each is lazy and typed, and its examples run."""

import ast
import doctest
import inspect

import pytest

import shardformer
from shardformer.config.registries import ADDED
from tests.launch import ROOT

# Names stay in this table for ever; new ones are added.
PUBLIC = (
    "ACTIVATIONS", "Config", "Generator", "Model", "NORMS", "OPTIMIZERS", "OwnBatches", "POSITIONS", "RunError",
    "SCHEDULES", "Sampling", "Session", "Task", "Trained", "Trainer", "UsageError", "exact", "load_corpus", "preset",
    "run_command", "verify_function", "xmap",
)  # fmt: skip
# `Model`, `Trainer`, `Generator` and `Trained` compile before they do anything.
WITHOUT_EXAMPLE = ("Generator", "Model", "RunError", "Trained", "Trainer", "UsageError")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CHANGELOG = (ROOT / ".github" / "CHANGELOG.md").read_text()


def find_vanished(exported, changelog: str) -> list[str]:
    """Returns the public names that are no longer exported, of which the changelog has no line."""
    return [name for name in PUBLIC if name not in exported and f"`shardformer.{name}` is removed" not in changelog]


def test_public_name_does_not_vanish_in_silence():
    advice = "a user's import fails: write a line '`shardformer.NAME` is removed; use ...' in .github/CHANGELOG.md"
    assert find_vanished(shardformer.__all__, CHANGELOG) == [], advice


def test_vanished_name_is_noticed():
    without_task = [name for name in shardformer.__all__ if name != "Task"]
    assert find_vanished(without_task, CHANGELOG) == ["Task"]
    assert find_vanished(without_task, "`shardformer.Task` is removed; use ...") == []


def test_new_public_name_is_recorded():
    assert sorted(PUBLIC) == sorted(shardformer.__all__), (
        "add new names to PUBLIC and to reference/api.md of scripts/docs"
    )


def read_typed_names(source: str) -> dict[str, str]:
    """Returns the names that a type checker sees under TYPE_CHECKING, each with its module."""
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    pairs = [(alias.name, node.module) for node in block.body for alias in node.names]
    return {name: module.removeprefix("shardformer.").replace("shardformer", name) for name, module in pairs}


def test_lazy_names_have_their_types():
    source = (ROOT / "shardformer" / "__init__.py").read_text()
    assert read_typed_names(source) == shardformer.LAZY
    assert read_typed_names(source.replace("import exact\n", "import convert\n")) != shardformer.LAZY


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_importable_and_described(name):
    value = getattr(shardformer, name)
    assert inspect.getdoc(value)


def find_examples(value) -> list[doctest.DocTest]:
    """Returns the examples in the docstrings of an object of the package and of its public members."""
    members = value.__dict__ if inspect.isclass(value) else {}
    functions = [value, *(member for name, member in members.items() if not name.startswith("_"))]
    parser = doctest.DocTestParser()
    texts = [(inspect.getdoc(function) or "", getattr(function, "__module__", "")) for function in functions]
    return [parser.get_doctest(text, {}, name, name, 0) for text, name in texts if ">>>" in text]


def owner_of_examples(name: str) -> list:
    """Returns the objects whose docstrings have the examples of a public name."""
    value = getattr(shardformer, name)
    if name.isupper():
        return [type(value)]
    return [value.run, value.explain] if inspect.ismodule(value) else [value]


@pytest.fixture
def without_cube():
    """Removes the activation that an example registers."""
    yield
    shardformer.ACTIVATIONS.pop("cube", None)
    ADDED.clear()


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in WITHOUT_EXAMPLE])
def test_examples_of_public_name_run(name, without_cube):
    examples = [example for owner in owner_of_examples(name) for example in find_examples(owner)]
    assert examples
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    assert [runner.run(example).failed for example in examples] == [0] * len(examples)


def test_wrong_example_is_noticed():
    def double(x):
        """Returns 2 x.

        >>> 2 * 2
        5
        """

    (example,) = find_examples(double)
    assert doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=lambda text: None).failed == 1
