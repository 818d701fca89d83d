"""Nothing about a key is forgotten: a place that reads it, the reference of the model, a row for each of its rules."""

import ast
import dataclasses
import functools
import traceback
from pathlib import Path
from unittest import mock

import jax
import pytest

import shardformer
from shardformer.config import FIELDS, Config, preset, registries
from shardformer.config.key_rules import check_zero
from shardformer.config.model_keys import ModelKeys
from shardformer.errors import UsageError
from shardformer.model import Model
from tests.config import test_key_rules as rows

PACKAGE = Path(shardformer.__file__).parent
RULES = [*sorted(PACKAGE.glob("*/*_keys.py")), PACKAGE / "config/key_rules.py", PACKAGE / "objectives/objective.py"]
REFERENCE = PACKAGE / "analysis" / "dense_reference.py"

# Keys of the model that the reference reads from its parameters' shapes, each with a value that changes the shapes.
IN_SHAPES = {
    "kv_heads": {"kv_heads": 2}, "d_ff": {"d_ff": 64}, "seq": {"seq": 32, "positions": "learned"},
    "vocab_multiple": {"vocab_multiple": 48}, "bias": {"bias": "all"}, "head_bias": {"head_bias": False},
    "value_dim": {"value_dim": 8, "kv_latent": 16, "rotary_dims": 2, "bias": "none"},
    "embed_dim": {"embed_dim": 16},
    "previous_tokens": {"previous_tokens": 1},
}  # fmt: skip
INITIAL_VALUES_ONLY = {"init_std"}


def names_read(source: str) -> set[str]:
    """Returns the attributes that a source reads, and its strings, outside of the functions that check rules."""
    tree = ast.parse(source)
    rules = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name.lstrip("_").startswith("check")
        for node in ast.walk(function)
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in rules]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return read | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def unread_keys(sources: list[str], keys) -> set[str]:
    """Returns the flat names of the keys that no source reads."""
    read = set().union(*map(names_read, sources))
    return {name for name, field in keys.items() if not {field.name, name} & read}


def keys_of_the_model(source: str) -> set[str]:
    """Returns the keys that a source reads as `config.model.KEY`."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Attribute) and node.value.attr == "model"}


def test_every_key_is_read():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "presets.py"]
    assert unread_keys(sources, FIELDS) == set()


def test_key_that_nothing_reads_is_noticed():
    field = dataclasses.field(default=1)
    field.name = "speed"
    source = "class Keys:\n speed: int = 1\n def check(self):\n  require(self.speed > 0, 'speed')\n"
    assert unread_keys([source, '"""speed is a key."""'], {"speed": field}) == {"speed"}
    assert unread_keys([source, "def step(config): return config.run.speed"], {"speed": field}) == set()


def test_reference_knows_every_key_of_the_model():
    """A key that the reference does not name must change the shapes of the parameters, or only their first values."""
    keys = {field.name for field in dataclasses.fields(ModelKeys)}
    unnamed = keys - keys_of_the_model(REFERENCE.read_text())
    assert unnamed == IN_SHAPES.keys() | INITIAL_VALUES_ONLY


@pytest.mark.parametrize("name", IN_SHAPES)
def test_key_that_the_reference_does_not_name_changes_shapes(name):
    changes = IN_SHAPES[name]
    before = {key: value for key, value in changes.items() if key != name}

    def shapes(changes):
        parameters = Model.abstract_parameters(preset("tiny", vocab=61, **changes))
        return [(str(path), leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)]

    assert shapes(changes) != shapes(before)


def test_key_that_the_reference_lacks_is_noticed():
    source = "def norm(c, x): return x * c.model.norm_eps + c.training.scale"
    assert keys_of_the_model(source) == {"norm_eps"}


def rejections(function) -> list[tuple[dict, str]]:
    """Returns the rows of a test that `pytest.mark.parametrize` gives it."""
    return [tuple(row) for row in function.pytestmark[0].args[1]]


def find_rule(make) -> tuple[str, int]:
    """Returns the file and the line of the rule that rejects a configuration."""
    with pytest.raises(UsageError) as caught:
        make()
    frames = traceback.extract_tb(caught.value.__traceback__)
    frame = frames[-2] if frames[-1].name == "require" else frames[-1]
    return Path(frame.filename).name, frame.lineno or 0


@functools.cache
def rules_with_rows() -> set[tuple[str, int]]:
    context = {"mesh": "dp2.cp2.mp2", "batch": 8, "seq": 16, "layers": 4, "heads": 8, "vocab": 64}
    made = [lambda: check_zero(Config.of(zero=1, mesh="1x1"))]  # a rule of training only
    frozen = {"weights": "int8", "mesh": "1x1"}
    made += [lambda: check_zero(Config.of(**frozen))]
    made += [lambda: check_zero(Config.of(**frozen, lora_rank=2, param_dtype="bfloat16", dtype="bfloat16"))]
    made += [functools.partial(Config.of, **changes) for changes, _ in rejections(rows.test_every_rule)]
    made += [functools.partial(Config.of, **changes) for changes, _ in rejections(rows.test_invalid_window_is_rejected)]
    for changes, _ in rejections(rows.test_split_context_that_cannot_run_is_rejected):
        made.append(functools.partial(Config.of, **context | changes))
    registered = registries.read_parameters(FIELDS["positions"].metadata["registry"])
    with mock.patch.dict(registered, misspelt=("config", "distances_TS")):  # a function that a user registers
        return {find_rule(make) for make in [*made, lambda: Config.of(positions="misspelt")]}


def rules_in(path: Path, source: str) -> list[tuple[str, int, int]]:
    """Returns the file and the first and last line of each rule."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        (path.name, call.lineno, call.end_lineno or 0)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "require"
    ]


def rules_without_row(rules, covered) -> list[str]:
    return [
        f"{name}:{first}"
        for name, first, last in sorted(rules)
        if not any(name == file and first <= line <= last for file, line in covered)
    ]


def test_every_rule_has_a_row():
    rules = [rule for path in RULES for rule in rules_in(path, path.read_text())]
    assert rules_without_row(rules, rules_with_rows()) == []


def test_rule_without_a_row_is_noticed():
    source = "def check(c):\n require(c.a, 'a')\n require(\n  c.b, 'b'\n )\n"
    rules = rules_in(Path("new_keys.py"), source)
    assert rules_without_row(rules, {("new_keys.py", 2)}) == ["new_keys.py:3"]
    assert rules_without_row(rules, {("new_keys.py", 2), ("new_keys.py", 4)}) == []


def bounds_without_row(fields, messages) -> list[str]:
    """Returns the keys with a bound that no message names."""
    return sorted(
        f"{name} {option}"
        for name, field in fields.items()
        for option, words in (("least", ("must be at least", "must not be negative")), ("below", ("must be below",)))
        if field.metadata[option] is not None
        if not any(message.startswith(f"{name} {some}") for message in messages for some in words)
    )


def test_bound_without_a_row_is_noticed():
    field = dataclasses.field(metadata={"least": 1, "below": 2})
    messages = ["rate must be at least 1", "speed must be below 2"]
    assert bounds_without_row({"rate": field}, messages) == ["rate below"]
    assert bounds_without_row({"rate": field, "speed": field}, messages) == ["rate below", "speed least"]


def test_every_bound_has_a_row():
    messages = [message for _, message in rejections(rows.test_every_rule)]
    messages += [message for _, message in rejections(rows.test_invalid_window_is_rejected)]
    assert bounds_without_row(FIELDS, messages) == []


def conditions_without_row(fields, messages) -> set[str]:
    """Returns the keys with a condition that no message starts with."""
    conditional = {name for name, field in fields.items() if field.metadata["needs"] or field.metadata["used_if"]}
    return conditional - {message.split()[0] for message in messages}


def test_every_condition_of_a_key_has_a_row():
    messages = [message for _, message in rejections(rows.test_key_without_effect_is_rejected)]
    assert conditions_without_row(FIELDS, messages) == set()


def test_condition_without_a_row_is_noticed():
    needing = dataclasses.field(metadata={"needs": "a", "used_if": None})
    free = dataclasses.field(metadata={"needs": None, "used_if": None})
    assert conditions_without_row({"a": needing, "b": needing, "c": free}, ["b needs a"]) == {"a"}
