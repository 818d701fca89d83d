"""The lessons as notebooks, made from the lessons' sources."""

import json
from pathlib import Path

from shardformer.course.lesson import Lesson, open_hole

SETUP = """\
# On Colab, first install the package: %pip install -q <the address of its repository>
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # eight devices on one CPU; before JAX is used"""


def write_notebook(lesson: Lesson) -> str:
    """Returns the notebook of one lesson as JSON; its last cell checks the function of the cell above."""
    title, _, text = lesson.text.partition("\n")
    cells = lesson.cells
    check = f"from shardformer.course.checker import check_in_notebook\n\ncheck_in_notebook({lesson.number}, globals())"
    notebook_cells = [
        _markdown(f"# Lesson {lesson.number}: {title}\n{text}"),
        _code(SETUP),
        _markdown("The dense result, on one device, and how arguments and results are split:"),
        _code(f"{cells['setup']}\n\n{cells['dense']}"),
        _markdown("The function of one shard. Fill the hole:"),
        _code(open_hole(cells["shard"] + "\n").rstrip()),
        _code(check),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": notebook_cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    for number, cell in enumerate(notebook_cells):
        cell["id"] = f"cell-{number}"
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def write_notebooks(lessons: list[Lesson], folder: Path) -> list[Path]:
    """Writes one notebook for each lesson; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for lesson in lessons:
        path = folder / f"{lesson.path.stem}.ipynb"
        path.write_text(write_notebook(lesson), encoding="utf-8")
        paths.append(path)
    return paths


def _markdown(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str) -> dict:
    lines = text.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines}
