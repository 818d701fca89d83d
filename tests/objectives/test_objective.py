"""Each objective is declared once, and no other code compares its name."""

import ast
from pathlib import Path

import pytest

from shardformer.config import FIELDS, Config
from shardformer.config.parsing import choices
from shardformer.errors import UsageError
from shardformer.model import Model, TaskOnMesh
from shardformer.model.task_on_mesh import choose_task
from shardformer.objectives.objective import OBJECTIVES
from tests import shared

PACKAGE = Path(__file__).parents[2] / "shardformer"
COMPLETE: dict[str, dict] = {"distill": {"teacher": "a run"}, "task": {"vocab": 1}}
COMPLETE |= {name: {"batch": 16} for name in ("grpo", "dr_grpo", "gspo", "rloo")}  # two groups of answers


def make_config(name: str) -> Config:
    return Config.of(objective=name, **COMPLETE.get(name, {}))


def test_every_value_of_the_key_is_declared():
    assert set(choices(FIELDS["objective"])) == OBJECTIVES.keys()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_declared_class_is_a_task(name):
    task, objective = choose_task(make_config(name)), make_config(name).objective
    assert issubclass(task, TaskOnMesh)
    assert issubclass(task, Model) == objective.reads_tokens
    assert objective.name == name


def find_comparisons(source: str) -> list[str]:
    """Returns the comparisons with the name of an objective."""
    words = {"task", "reward"}  # also the words of other things
    names = OBJECTIVES.keys() - words
    if "objective" not in source and not any(f"{quote}{name}{quote}" in source for name in names for quote in "'\""):
        return []  # parsing takes all of the time

    def is_found(text: str) -> bool:
        has_word = "objective" in text and any(f"'{word}'" in text for word in words)
        return has_word or "preferences.objective" in text or any(f"'{name}'" in text for name in names)

    texts = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [text for text in texts if is_found(text)]


def test_only_the_folder_of_objectives_compares_their_names():
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "objectives"]
    assert {str(path): found for path in paths if (found := find_comparisons(path.read_text()))} == {}


def test_comparison_of_a_name_is_noticed():
    assert find_comparisons('if config.preferences.objective == "task": pass') == [
        "config.preferences.objective == 'task'"
    ]
    assert find_comparisons("if name in ('dpo', 'ipo'): pass") == ["name in ('dpo', 'ipo')"]
    assert find_comparisons("if keys.objective != 'reward': pass") == ["keys.objective != 'reward'"]
    assert find_comparisons("if keys.objective in ('task',): pass") == ["keys.objective in ('task',)"]
    assert find_comparisons("if config.objective and name == 'reward': pass") == []
    assert find_comparisons("if config.objective.reads_pairs: pass") == []


@pytest.mark.parametrize("name", ["lm", "dpo", "grpo"])
def test_objective_of_text_rejects_a_task(name):
    with pytest.raises(UsageError, match=f"a task has a loss of its own, got objective={name}"):
        Config.of(objective=name, task="a.py:A")


def test_pairs_count_twice_and_prompts_once_for_their_answers():
    pairs, prompts = (shared.tiny(objective=name, batch=8, answer_tokens=4) for name in ("dpo", "grpo"))
    assert (pairs.model_rows, pairs.data_rows) == (16, 8)
    assert (prompts.model_rows, prompts.data_rows) == (8, 8 // prompts.preferences.group_size)
