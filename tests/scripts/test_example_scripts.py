"""The programs of scripts/examples/: each runs and reaches what it says. tests/tasks/test_examples.py has the tasks."""

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from shardformer import Session, legacy
from shardformer.__main__ import main
from shardformer.analysis import traced
from shardformer.errors import UsageError
from tests import runs
from tests.integration.test_readme import check

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
INDEX = (EXAMPLES / "README.md").read_text()
FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
WITH_COMMANDS = ("preferences", "verifier", "qlora")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_cells(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder; sessions of one configuration share their compiled programs, and draw no curves."""
    monkeypatch.chdir(tmp_path)
    runs.share_trainers(monkeypatch)
    monkeypatch.setattr("shardformer.session.draw_curves", lambda *_: None)
    return tmp_path


def run_here(command, **_):
    """Runs `python -m shardformer ...` in this process, in place of subprocess.run."""
    _, dash_m, package, name, *words = command
    assert (dash_m, package) == ("-m", "shardformer")
    assert (runs.train(*words) if name == "train" else main([name, *words])) == 0


def leave_run(folder: Path, end: bool = False) -> None:
    """Leaves what a run of an earlier start left, which a new run does not overwrite."""
    (folder / "step_00000001").mkdir(parents=True)
    for name in ("config.json", "metrics.csv", *["final.json"] * end):
        (folder / name).touch()


def test_index_lists_each_program_with_its_seconds():
    rows = dict(re.findall(r"^\| \[(\w+\.\w+)\]\(\1\) \|.*\| (\d+) \|$", INDEX, re.MULTILINE))
    assert sorted(rows) == [path.name for path in FILES]
    assert len(rows) >= 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_program_is_a_page_that_starts_with_its_purpose(path):
    code = path.suffix == ".py"
    text = path.read_text() if code else "\n".join(read_cells(path, "code") + read_cells(path, "markdown"))
    assert len(text.splitlines()) <= (100 if path.name == "mesh_transformer.py" else 80)
    if code:
        assert re.match(r'r?"""[A-Z][^"]*\n\n    (python|export) ', text), "a purpose, and the command to run it"


@pytest.fixture
def sessions(monkeypatch):
    """The sessions that a program would train; the slow test_own_data_and_optimizer_reach_what_they_say trains them."""
    found = []

    def train(session):
        found.append(session)
        return SimpleNamespace(best=SimpleNamespace(val_loss=3.0))

    monkeypatch.setattr(Session, "train", train)
    return found


def test_own_optimizer_is_accepted(folder, sessions):
    leave_run(folder / "checkpoints" / "optimizer_adamw")
    assert load("own_optimizer").main(steps=3).keys() == {"adamw", "lion"}
    adamw, lion = (traced.make_trainer(session.run.config).abstract.optimizer for session in sessions)
    assert jax.tree.structure(adamw) != jax.tree.structure(lion)


def test_own_data_is_a_function_of_the_step(folder, sessions):
    module = load("own_data")
    leave_run(folder / "checkpoints" / "counting")
    module.main(steps=2)
    [session] = sessions
    first = next(session.corpus.train_batches(session.run.config))
    assert (first["tokens"] == module.draw_batch(0)["tokens"]).all()
    third = next(module.batches_from(2))
    assert (third["tokens"] == module.draw_batch(2)["tokens"]).all()
    assert (third["tokens"] != module.draw_batch(3)["tokens"]).any()
    assert (third["targets"][:, 1:-1] == third["tokens"][:, 2:]).all()


def test_proof_names_the_line_of_the_missing_sum():
    module = load("prove_a_mesh")
    right, wrong = module.main(dp=8, mp=4)
    assert right == []
    line = module.forgetful.__code__.co_firstlineno + 2
    assert any("A psum over mp is missing" in sentence for sentence in wrong)
    assert any(f"prove_a_mesh.py:{line} (forgetful)" in sentence for sentence in wrong)


def test_xmap_program_runs_unedited(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    legacy.install()
    try:
        assert runpy.run_path(str(EXAMPLES / "xmap_code.py"))["main"]() < 1e-4
    finally:
        legacy.uninstall()


def test_xmap_program_needs_the_removed_names(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ImportError):
        runpy.run_path(str(EXAMPLES / "xmap_code.py"))


def test_cells_of_the_notebook_run(folder, text, monkeypatch, capsys):
    install, *cells = read_cells(EXAMPLES / "notebook.ipynb", "code")
    assert install.splitlines()[-1] == "%pip install -q shardformer"
    code = "\n".join(cells)
    leave_run(folder / "checkpoints" / "notebook")
    monkeypatch.setattr("logging.Logger.setLevel", lambda *_: None)
    code = code.replace('data="builtin"', f"data={str(text)!r}").replace("steps=100", "steps=2, decay_steps=3")
    exec(compile(code.replace("steps=120", "steps=3"), "notebook", "exec"), {})
    assert capsys.readouterr().out.count("Best(step=") == 2


def test_verifier_accepts_each_right_digit_only():
    is_between = load("verifier").is_between
    assert [digit for digit in "0123456789" if is_between("7 2 ", digit, "4")] == ["3", "4", "5", "6"]
    assert is_between("2 7 ", "x", "4") == is_between("2 7 ", "", "4") == 0


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_of_the_program_are_understood(folder, monkeypatch, name):
    lines = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: lines.append(shlex.join(command[3:])))
    with pytest.raises(FileNotFoundError):  # what the commands would have written
        load(name).main()
    assert len(lines) >= 1
    for line in lines:
        if not line.startswith("convert "):
            check(line.replace("train base=", "train tiny base="))


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_program_replaces_its_run_of_an_earlier_start(folder, monkeypatch, name):
    module = load(name)
    out = folder / (module.OUT if name == "verifier" else module.TUNED)
    leave_run(out)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError):  # what the commands would have written
        module.main()
    assert not out.exists()


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", ["preferences", "qlora", "serve_and_query"])
def test_base_is_used_only_if_its_training_ended(folder, monkeypatch, name, ended):
    module, lines = load(name), []
    leave_run(folder / module.BASE, ended)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: lines.append(shlex.join(command[3:])))
    monkeypatch.setattr(module, "start_server", Path("no_server").read_text, raising=False)
    with pytest.raises(FileNotFoundError):
        module.main()
    base = f"train tiny data=builtin seq=32 steps=100 out={module.BASE}"
    assert lines.count(base) == (not ended)
    assert (folder / module.BASE).exists() == ended


def test_wrong_command_of_a_program_is_noticed():
    with pytest.raises(UsageError):
        check("train tiny data=builtin stepz=100")


@pytest.fixture(scope="module")
def base(tmp_path_factory, text):
    """A small run for the programs that start from one, in place of theirs."""
    out = tmp_path_factory.mktemp("examples") / "base"
    assert runs.train("tiny", f"data={text}", "seq=32", "steps=2", "mesh=1x1", f"out={out}") == 0
    return out


@pytest.fixture
def with_base(folder, base, monkeypatch):
    monkeypatch.setattr(subprocess, "run", run_here)
    (folder / "checkpoints").mkdir()
    for name in ("example", "gptj_like"):
        (folder / "checkpoints" / name).symlink_to(base)
    return folder


@pytest.mark.slow
def test_preferences_reach_the_right_order(with_base):
    assert load("preferences").main(steps=30)[-1] > 0.9


@pytest.mark.slow
def test_verified_answers_become_more(folder, monkeypatch):
    monkeypatch.setattr(subprocess, "run", run_here)
    first, last = load("verifier").main()
    assert last > first + 0.2


@pytest.mark.slow
def test_adapters_are_written_for_peft(with_base):
    settings = load("qlora").main(steps=2)
    assert (settings["r"], settings["peft_type"]) == (4, "LORA")
    assert (with_base / "checkpoints/poem_peft/adapter_model.safetensors").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.multiprocess
def test_server_answers_the_same_for_a_seed(with_base, monkeypatch):
    pytest.importorskip("uvicorn")
    first, second, third = (answer["choices"][0]["text"] for answer in load("serve_and_query").main())
    assert first == third != second


@pytest.mark.slow
def test_own_data_and_optimizer_reach_what_they_say(folder):
    assert load("own_data").main() < 0.1
    assert max(load("own_optimizer").main().values()) < 3.0
