"""The sources of the documentation: each page is in the menu, and each key, command and public name has an entry.

`scripts/docs.sh` builds the site, which checks links, anchors and docstrings; .github/workflows/docs.yml runs it.
"""

import importlib.util
import re
import sys

import pytest

import shardformer
from shardformer import config
from shardformer.__main__ import main
from shardformer.cli.commands import COMMANDS, RUN_KEYS, load
from shardformer.config import parsing
from tests.integration.test_readme import check
from tests.launch import ROOT

DOCS = ROOT / "scripts" / "docs"
PAGES = DOCS / "pages"
TUTORIAL = "\n".join(path.read_text() for path in sorted((PAGES / "tutorial").glob("*.md")))


@pytest.fixture(scope="module")
def stage():
    spec = importlib.util.spec_from_file_location("stage", DOCS / "stage.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["stage"] = script
    spec.loader.exec_module(script)
    yield script
    del sys.modules["stage"]


def list_menu(index: str) -> set[str]:
    """Returns the pages that the menu names."""
    trees = re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    return {re.sub(r".*<(.*)>", r"\1", line) for line in lines}


def list_pages(stage) -> set[str]:
    """Returns all pages but the first one."""
    own = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")}
    generated = {"reference/keys.md", "reference/commands.md"}
    return {page.removesuffix(".md") for page in {*own, *generated, *stage.find_readmes().values()}} - {"index"}


def test_every_page_is_in_the_menu(stage):
    index = (PAGES / "index.md").read_text()
    assert list_menu(index) == list_pages(stage)
    assert list_menu(index.replace("guide/optim\n", "")) == list_pages(stage) - {"guide/optim"}


def test_every_readme_is_a_page(stage):
    readmes = {path.relative_to(ROOT).as_posix() for path in (ROOT / "shardformer").rglob("README.md")}
    assert len(readmes) > 20
    assert readmes <= stage.find_readmes().keys()


def test_links_of_readmes_move_with_their_pages(stage, tmp_path):
    stage.write_readmes(tmp_path)
    page = (tmp_path / "guide" / "shards.md").read_text()
    assert "](parallel.md#split-the-context)" in page
    assert "![One layer on a 2x2 mesh](../files/layer.png)" in page
    assert (tmp_path / "files" / "layer.png").exists()


def test_link_without_a_target_is_an_error(stage, tmp_path):
    with pytest.raises(FileNotFoundError):
        stage.move_links("see [this](no_such.py)", "shardformer/README.md", "project/shardformer.md", {}, tmp_path)
    inside = "```\n[a](no_such.py)\n```\n"
    assert stage.move_links(inside, "shardformer/README.md", "project/shardformer.md", {}, tmp_path) == inside


def test_folder_of_others_is_not_deleted(stage, tmp_path):
    (tmp_path / "thesis.md").write_text("mine")
    with pytest.raises(SystemExit, match="has files that this program did not write"):
        stage.stage(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.md"]


def test_pages_of_an_earlier_call_are_replaced(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "list_splits", lambda out: "")  # draws for seconds
    stage.stage(tmp_path)
    (tmp_path / "removed_since.md").touch()
    stage.stage(tmp_path)
    assert not (tmp_path / "removed_since.md").exists()
    assert (tmp_path / "examples.md").exists()


def test_every_example_is_on_its_page(stage, tmp_path):
    page = stage.list_examples(tmp_path)
    names = [path.name for path in (ROOT / "scripts/examples").iterdir() if path.suffix in (".py", ".ipynb")]
    assert [name for name in names if f"`scripts/examples/{name}`" not in page] == []
    (notebook,) = re.findall(r"\]\((.+\.ipynb)\)", page)
    assert (tmp_path / notebook).exists()


def test_included_files_exist():
    for path in PAGES.rglob("*.md"):
        for name in re.findall(r"{literalinclude} (\S+)", path.read_text()):
            assert (path.parent / name).exists(), f"{path} includes {name}"


def test_reference_has_every_key(stage):
    page = stage.list_keys()
    assert set(re.findall(r"^```{confval} (\w+)$", page, re.M)) == set(config.FIELDS)


def test_key_has_its_type_default_bounds_and_needs(stage):
    entries = {name: " ".join(stage.list_key(config.FIELDS[name], "")) for name in config.FIELDS}
    assert "`int`; by default `4`" in entries["layers"]
    assert "Cannot change on resume." in entries["layers"]
    assert "Cannot change on resume." not in entries["log_every"]
    assert "`int` or `all`; by default `200`" in entries["eval_batches"]
    assert "At least 1." in entries["eval_batches"]
    assert "`FILE.py:NAME`; by default `adamw`" in entries["optimizer"]
    assert "Needs {confval}`eval_tasks`." in entries["eval_limit"]
    assert "Rejected without positions=rotary." in entries["rotary_theta"]


def test_reference_has_every_command_and_option(stage):
    page = stage.list_commands()
    entries = dict(zip(*[iter(re.split(r"^### (\w+)$", page, flags=re.M)[1:])] * 2, strict=True))
    assert entries.keys() == COMMANDS.keys()
    for name, command in COMMANDS.items():
        wanted = [key for path in command.options if path != RUN_KEYS for key in parsing.keys_of(load(path))]
        assert sorted(re.findall(r"^```{option} (\w+)=", entries[name], re.M)) == sorted(wanted)


def test_reference_has_every_public_name():
    page = (PAGES / "reference" / "api.md").read_text()
    assert [name for name in shardformer.__all__ if f"shardformer.{name}" not in page] == []


def test_text_is_escaped_outside_of_code(stage):
    assert stage.escape("a_b `c_d` <e>") == r"a\_b `c_d` \<e\>"


def test_commands_of_the_tutorial_are_understood():
    lines = re.findall(r"^python -m shardformer ([^#\n]+)", TUTORIAL.replace("\\\n", ""), re.M)
    lines += re.findall(r"`python -m shardformer (\w[^`]+)`", TUTORIAL)
    assert len(lines) > 8
    for line in lines:
        check(line)


def test_task_of_the_tutorial_is_proved():
    assert main(["verify", f"task={PAGES}/tutorial/squares.py:Squares", "mesh=4x2", "batch=8", "exact=true"]) == 0


@pytest.mark.parametrize(
    ("wrong", "status"), [(("psum(", "pmean("), 1), (('jax.lax.psum(jax.nn.gelu(batch["x"] @ up) @ down, "mp")',
                           'jax.nn.gelu(batch["x"] @ up) @ down'), 2)], ids=["a mean", "no sum"],
)  # fmt: skip
def test_mistake_in_the_task_is_noticed(tmp_path, wrong, status):
    source = (PAGES / "tutorial" / "squares.py").read_text()
    assert wrong[0] in source
    (tmp_path / "squares.py").write_text(source.replace(*wrong))
    task = f"task={tmp_path}/squares.py:Squares"
    assert main(["verify", task, "mesh=4x2", "batch=8", "exact=true"]) == status


def test_first_task_differs_in_the_lines_that_it_names():
    dense, split = (
        set((PAGES / "tutorial" / name).read_text().splitlines()) for name in ("squares_dense.py", "squares.py")
    )
    assert sum("hidden" in line for line in split - dense) == 3
    assert len(split - dense) == 4
    assert len(dense - split) == 3
