"""Wrong commands: one message that says what to do, the right exit status, and nothing written or harmed."""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest

import shardformer
from shardformer import __main__
from shardformer.__main__ import main
from shardformer.cli import commands, eval_command, help, show_command, train_command
from shardformer.cli import words as command_words
from shardformer.training.run_folder import Run
from tests import runs

USAGE, FAILED = 2, 1
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert runs.train("tiny", "mesh=4x2", f"data={text}", "steps=4", f"out={out}") == 0
    return out


@pytest.fixture
def run(trained, tmp_path):
    """A finished run that may be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Gives a wrong command, and checks all that holds for every one of them."""
    monkeypatch.chdir(tmp_path)

    def refuse(status: int, message: str, *words):
        before = snapshot(tmp_path)
        assert main([str(word) for word in words]) == status
        error = capsys.readouterr().err
        prefix = {USAGE: "shardformer: error: ", FAILED: "shardformer: failed: "}[status]
        assert error.startswith(prefix)
        assert error.count("\n") == 1  # one message, and no traceback
        assert message in error
        assert snapshot(tmp_path) == before

    return refuse


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("unknown command 'trian'; did you mean 'train'?", ["trian", "tiny"]),
        ("name a preset: tiny, shakespeare_cpu", ["train"]),
        ("train takes a preset or --resume RUN, not both", ["train", "tiny", "--resume", "run"]),
        (
            "lora_rank trains adapters beside the frozen weights of a trained run; name it: base=RUN",
            ["train", "tiny", "lora_rank=2"],
        ),
        ("profile=5:9 begins after the last step, steps=3", ["train", "tiny", "steps=3", "profile=5:9"]),
        ("lora_targets does nothing without lora_rank; give lora_rank as well", ["train", "tiny", "lora_targets=q"]),
        ("ema_names does nothing without ema; give ema as well", ["show", "tiny", "ema_names=*"]),
        ("lr_rules: foo=2x matches no parameter", ["show", "tiny", "lr_rules=foo=2x"]),
        ("unknown preset 'tyny'; did you mean 'tiny'?", ["train", "tyny"]),
        ("unknown preset 'layers=2'", ["train", "layers=2"]),
        ("unknown key 'layer'; did you mean 'layers'?", ["train", "tiny", "layer=2"]),
        ("expected key=value, got '--layers'", ["train", "tiny", "--layers", "2"]),
        ("layers takes a whole number, got 'two'", ["train", "tiny", "layers=two"]),
        ("lr is given twice", ["train", "tiny", "lr=1", "lr=2"]),
        ("picture takes the name of a file that ends in .png", ["plan", "tiny", "sweep=true", "picture=x.foo"]),
        ("picture=no/x.png: there is no folder no; make it", ["memory", "tiny", "picture=no/x.png"]),
        ("json=no/x: there is no folder no; make it first", ["bench", "step", "json=no/x"]),
        ("out=no/x.png: there is no folder no; make it", ["plot", "run", "out=no/x.png"]),
        ("AxBxC (and pp stages of a pipeline, such as 2x2x2) or auto, got '4,2'", ["train", "tiny", "mesh=4,2"]),
        ("heads=8 does not divide over mp=3 (mesh=1x3); try mesh=1x2", ["train", "tiny", "mesh=1x3"]),
        ("batch=8 does not divide over dp=3 (mesh=3x1); try batch=9", ["train", "tiny", "mesh=3x1"]),
        ("zero=1 splits over dp, and mesh=1x8 has dp=1; give zero=0", ["train", "tiny", "mesh=1x8", "zero=1"]),
        ("d_model=32 does not divide into heads=5; try heads=4", ["train", "tiny", "heads=5"]),
        ("such as 2x2x2) or auto, got '9999", ["train", "tiny", "mesh=" + 5000 * "9" + "x1"]),
        ("lr must be a finite number, got inf", ["train", "tiny", "lr=inf"]),
        ("steps must be at least 1, got 0", ["train", "tiny", "steps=0"]),
        ("tokenizer=bpe:N takes N from 257", ["train", "tiny", "tokenizer=bpe:" + 5000 * "9"]),
        ("steps must be below 2**31", ["train", "tiny", "steps=1e12"]),
        ("data=nowhere.txt: there is no such file; data takes auto", ["train", "tiny", "data=nowhere.txt"]),
        ("data=~no_such_user/x: there is no such file", ["train", "tiny", "data=~no_such_user/x"]),
        ("data=. is a folder without text files", ["train", "tiny", "data=."]),
        ("train --resume takes the folder of a run", ["train", "--resume"]),
        ("train --resume takes the folder of a run", ["train", "--resume", "steps=9"]),
        ("train --resume takes the folder of a run", ["train", "--resume="]),
        ("nowhere is not a run: it has no config.json", ["train", "--resume", "nowhere"]),
        (". is not a run: it has no config.json", ["sample", "."]),
        ("name the folder of a run first", ["sample"]),
        ("name the folder of a run first", ["sample", "prompt=ROMEO:"]),
        ("name the folder of a run first", ["eval"]),
        ("data takes: prepare SRC ... out=FOLDER, show FOLDER", ["data", "imprt", "x"]),
        ("cannot read nowhere.txt", ["data", "import", "nowhere.txt"]),
        ("name a preset", ["show"]),
        ("unknown preset", ["show", "large"]),
        ("vocab=2147483647 padded to vocab_multiple=8 must be below 2**31", ["show", "tiny", "vocab=2147483647"]),
        ("is too long for a name", ["eval", "x" * 300]),
        ("is too long for a name", ["plot", "x" * 300]),
        ("a\\nb\\x1b[31m is not a run: it has no config.json", ["eval", "a\nb\x1b[31m"]),
    ],
)
def test_wrong_words(refused, message, words):
    refused(USAGE, message, *words)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ("is empty: its 90/5/5 split needs two characters in each part", b""),
        ("is too short (3 characters)", b"abc"),
        ("is not UTF-8: invalid start byte (0xFF) at byte 2; convert it", b"ab\xff" * 100),
        ("has 90 tokens, and a window of seq=128 needs 129; take a longer text or seq=89", b"ab" * 50),
    ],
)
def test_wrong_texts(refused, tmp_path, message, content):
    (tmp_path / "text.txt").write_bytes(content)
    refused(USAGE, message, "train", "tiny", "mesh=1x1", "seq=128", "data=text.txt")


def test_a_file_that_is_not_tiny_shakespeare(refused, text):
    refused(USAGE, "is not tiny_shakespeare's input.txt: expected 1,115,394 bytes", "data", "import", text)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("mesh=2x5 takes 10 devices", ["mesh=2x5", "heads=5", "d_model=40", "vocab_multiple=10", "rotary_dims=8"]),
        ("mesh=16x1 takes 16 devices", ["mesh=16x1", "batch=16"]),
        ("vocab=10 is less than the 63 characters of", ["vocab=10"]),
        ("is a file; name a folder", ["out=file"]),
    ],
)
def test_what_the_devices_the_text_or_the_disk_refuse(refused, text, tmp_path, message, words):
    (tmp_path / "file").touch()
    refused(USAGE, message, "train", "tiny", f"data={text}", *words)


def test_an_out_that_cannot_be_made(refused, text, tmp_path):
    (tmp_path / "file").touch()
    refused(FAILED, "Not a directory", "train", "tiny", "mesh=1x1", f"data={text}", "out=file/run")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("run already holds a run; go on with `train --resume run`", ["train", "tiny", "data=builtin", "out=run"]),
        ("layers cannot change on resume: the run has 2, got 3", ["train", "--resume", "run", "layers=3"]),
        ("batch cannot change on resume: the run has 8, got 16", ["train", "--resume", "run", "batch=16"]),
        ("out cannot change on resume", ["train", "--resume", "run", "out=other"]),
        ("data=builtin is not what run was trained on", ["train", "--resume", "run", "data=builtin"]),
        ("unknown key 'tokens'; did you mean 'tokenizer'?", ["train", "--resume", "run", "tokens=9"]),
        ("mesh=16x1", ["train", "--resume", "run", "mesh=16x1"]),
        ("prompt: character 'é' (U+00E9) at index 2 (line 1, column 3)", ["sample", "run", "prompt=abé"]),
        ("prompt is empty", ["sample", "run", "prompt="]),
        ("top_p must be above 0 and at most 1, got 2.0", ["sample", "run", "top_p=2"]),
        ("temperature must be 0 or more, got nan", ["sample", "run", "temperature=nan"]),
        ("tokens must be at least 1, got 0", ["sample", "run", "tokens=0"]),
        ("seed must be in 0..2**31 - 1", ["sample", "run", "seed=99999999999999999999"]),
        ("run has no checkpoint of step 3; there are 4", ["sample", "run", "step=3"]),
        ("heads=8 does not divide over mp=3", ["sample", "run", "mesh=1x3"]),
        ("unknown key 'temprature'; did you mean 'temperature'?", ["sample", "run", "temprature=1"]),
        ("split is one of train, validation, test, all; got 'dev'", ["eval", "run", "split=dev"]),
        ("validation does nothing without data", ["eval", "run", "validation=0.1"]),
        ("run has no checkpoint of step 9", ["eval", "run", "step=9"]),
        ("run/config.json is not a run", ["sample", "run/config.json"]),
    ],
)  # fmt: skip
def test_what_a_run_refuses(refused, run, message, words):
    refused(USAGE, message, *words)


class Harm:
    """What a hostile pickle would do when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


STEP = "step_00000004/"
DAMAGE = {
    "cut arrays": (f"{STEP}arrays.npy", lambda data: data[:-100], "arrays.npy is truncated"),
    "longer arrays": (f"{STEP}arrays.npy", lambda data: data + b"x", "arrays.npy has 1 bytes after its last leaf"),
    "other arrays": (f"{STEP}arrays.npy", lambda data: b"x" * len(data), "the file is damaged"),
    "cut tree": (f"{STEP}tree.pkl", lambda data: data[:-10], "tree.pkl cannot be read"),
    "hostile tree": (f"{STEP}tree.pkl", lambda data: pickle.dumps(Harm(), 4), "needs no class or function"),
    "cut config": ("config.json", lambda data: data[:-10], "config.json is damaged"),
    "text in config": ("config.json", lambda data: data.replace(b'"seq": 16', b'"seq": ""'), "config.json is damaged"),
    "nested vocabulary": ("vocabulary.json", lambda data: b"[" * 100_000, "vocabulary.json is damaged (RecursionError"),
    "no vocabulary": ("vocabulary.json", lambda data: b"", "vocabulary.json is damaged"),
    "other vocabulary": ("vocabulary.json", lambda data: data.replace(b'"characters": "', b'"characters": "zz'),
                         "vocabulary.json is damaged"),
    "empty progress": (f"{STEP}progress.json", lambda data: b"{}", "progress.json is damaged"),
    "binary progress": (f"{STEP}progress.json", lambda data: b"\xff", "progress.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("command", [["train", "--resume", "run", "steps=6"], ["sample", "run", "tokens=2"]])
def test_damage_is_named(refused, run, name, command):
    file, damage, message = DAMAGE[name]
    data = (run / file).read_bytes()
    assert damage(data) != data
    (run / file).write_bytes(damage(data))
    refused(FAILED, message, *command)


@pytest.mark.parametrize("command", [["train", "--resume=run", "steps=6"], ["sample", "run"], ["eval", "run"]])
@pytest.mark.parametrize(("key", "true", "edited"), [("heads", 8, 4), ("d_model", 32, 64), ("seed", 0, 1)])
def test_a_config_that_was_edited_by_hand(refused, run, command, key, true, edited):
    path = run / "config.json"
    path.write_text(path.read_text().replace(f'"{key}": {true}', f'"{key}": {edited}'))
    message = f"run/config.json says {key}={edited}, but step_00000004 was trained with {key}={true}; set it back"
    refused(USAGE, message, *command)


def test_damaged_metrics_are_named(refused, run):
    Run.open(Path("run")).write_documents()  # its new place is in them, so that nothing else changes
    with open(run / "metrics.csv", "a") as file:
        file.write("abc\n")
    refused(FAILED, "metrics.csv, line 6, is not a row of metrics: 'abc'", "train", "--resume", "run")


def test_shards_of_gptj_are_no_run(refused, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/config.json").write_text('{"layers": 28, "n_heads": 16}')
    refused(USAGE, "shards is GPT-J's shards; make a run of it first: convert shards RUN", "sample", "shards")


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_a_run_without_a_checkpoint(refused, run, command):
    shutil.rmtree(run / "step_00000004")
    refused(USAGE, "run has no checkpoint yet", command, "run")


def test_a_missing_best_checkpoint(refused, run):
    (run / STEP).rename(run / "step_00000009")
    refused(USAGE, "run has no checkpoint of step 4; there are 9", "sample", "run", "step=4")
    assert main(["sample", "run", "tokens=4"]) == 0  # from the newest, as the best is gone


def test_a_text_that_has_changed(refused, run, tmp_path):
    runs.text(tmp_path, 19_999)
    refused(USAGE, "is not what run was trained on: that was", "train", "--resume", "run", "data=text.txt")
    changed = "so what the file holds or validation= has changed; bring the old data back"
    refused(USAGE, changed, "train", "--resume", "run", "validation=0.1")


def test_a_text_that_has_moved(run, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(text, "moved.txt")
    assert runs.train("--resume", "run", "data=moved.txt") == 0
    assert json.loads((run / "config.json").read_text())["data"] == str(tmp_path / "moved.txt")


def test_eval_on_another_text(run, tmp_path, text, capsys):
    """A converted model has none of its own; here the same text elsewhere gives the same losses."""
    shutil.copy(text, tmp_path / "moved.txt")
    said = []
    for words in [], [f"data={tmp_path / 'moved.txt'}"], [f"data={tmp_path / 'moved.txt'}", "validation=0.1"]:
        capsys.readouterr()
        assert main(["eval", str(run), "mesh=4x2", *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_more_memory_than_there_is(refused, text, monkeypatch):
    # Raised by hand: a CPU that runs out while it computes never answers.
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")
    monkeypatch.setattr(Run, "restore", mock.Mock(side_effect=error))
    refused(FAILED, "out of memory (RESOURCE_EXHAUSTED", "train", "tiny", "mesh=1x1", f"data={text}")


def test_a_checkpoint_under_another_steps_name(refused, run):
    """It would be the newest for ever: each resume would begin there, and what it saves be pruned."""
    (run / "step_00000004").rename(run / "step_00000099")
    message = "step_00000099 holds step 4; give it its own name back: step_00000004"
    refused(USAGE, message, "train", "--resume", "run", "steps=6")


def test_a_run_that_is_called_as_a_preset_is_not_taken_for_it(refused, run, text):
    run.rename(run.with_name("tiny"))
    words = ["train", "tiny", "mesh=4x2", f"data={text}"]
    refused(USAGE, "tiny already holds a run", *words, "out=tiny")
    run.with_name("tiny").rename(run)
    refused(USAGE, "run is a run; to continue it: train --resume run", "train", "run")


def test_a_run_that_began_while_this_one_waited(refused, run, text, monkeypatch):
    seen = iter([None])
    check = Run.refuse_to_overwrite
    monkeypatch.setattr(Run, "refuse_to_overwrite", lambda self: next(seen, "") is None or check(self))
    refused(USAGE, "run already holds a run", "train", "tiny", "mesh=4x2", f"data={text}", "steps=4", "out=run")


def test_a_settings_file_that_is_a_pipe(refused, run):
    (run / "config.json").unlink()
    os.mkfifo(run / "config.json")
    for words in (["eval", "run"], ["train", "--resume", "run"]):
        refused(FAILED, "It is a pipe or a device", *words)


def test_a_full_disk(refused, monkeypatch, run):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Run, "write_documents", full)
    refused(FAILED, "No space left on device", "train", "--resume", "run", "steps=6")


def test_help_and_no_command(capsys):
    for words, status in ([], 2), (["--help"], 0), (["help"], 0):
        assert main(words) == status
        said = capsys.readouterr().out
        assert said.startswith("usage: python -m shardformer COMMAND")
        assert all(f"  {name} " in said for name in commands.COMMANDS)  # none is missing in the groups


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_has_a_page_with_every_key_its_default_and_its_meaning(name, capsys):
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m shardformer {name} ")
    for place in commands.COMMANDS[name].options:
        for field in dataclasses.fields(commands.load(place)):
            assert f"\n  {field.name}={help._format_default(field.default)}" in said
            assert field.metadata["meaning"] in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 120


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"shardformer {shardformer.__version__} (jax {jax.__version__}, ")
    assert f'version="{shardformer.__version__}"' in (ROOT / "setup.py").read_text()


def test_a_character_that_the_terminal_lacks_is_escaped(tmp_path):
    code = "from shardformer.__main__ import main; main(['--version']); print('\U0001f600')"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment).endswith(b"\\U0001f600\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--help > /dev/full", 1, "shardformer: failed: [Errno 28] No space left on device\n"),
        ("--help > /dev/full 2>&1", 1, ""),
        ("nothing 2> /dev/full", 2, ""),
        ("--help >&-", 0, ""),
        ("--help >&- 2>&- <&-", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written(words, status, said):
    """Python's own end would write once more, fail, and make 120 of any exit status."""
    command = ["bash", "-c", f"{sys.executable} -m shardformer {words}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", said)


def test_help_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["train", "--help"]) == 0
    assert "peak learning rate" in capsys.readouterr().out


def test_lists_keep_their_lines():
    assert __main__._escape("a\nb:\n  - one\r\n  - two") == "a\\nb:\n  - one\\r\n  - two"
    assert __main__._escape("x" * 9999) == "x" * 1500 + "... (9,999 in all)"


def test_a_tight_address_space_is_refused():
    command = ["bash", "-c", f"ulimit -v 3000000; {sys.executable} -m shardformer show tiny"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == USAGE
    assert ended.stderr.startswith("shardformer: error: ulimit -v allows 3.07 GB of address space, and JAX")
    assert ended.stderr.count("\n") == 1


def test_devices_that_are_not_there(tmp_path):
    command = [sys.executable, "-m", "shardformer", "train", "tiny", "data=builtin", f"out={tmp_path}/run"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == USAGE
    assert ended.stderr.startswith("shardformer: error: JAX cannot use the devices that JAX_PLATFORMS=cuda asks for")
    assert ended.stderr.count("\n") == 1


def test_it_runs_from_the_folder_that_holds_the_clone(tmp_path):
    """There, `shardformer` names the clone's folder too; an editable install must be a plain path to win."""
    (tmp_path / "shardformer").symlink_to(ROOT)
    command = [sys.executable, "-m", "shardformer", "show", "tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert 'package_dir={"": "."}' in (ROOT / "setup.py").read_text()


def test_show(capsys):
    for words in ["tiny"], ["gptj_6b", "mesh=1x8"]:
        assert main(["show", *words]) == 0
    shown = capsys.readouterr().out
    assert '"d_model": 4096' in shown
    assert "transformer/layers/q" in shown


def test_an_empty_out_means_the_preset_s_own(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert command_words.parse_preset(["tiny", "out="]).out == "checkpoints/tiny"
    assert command_words.parse_preset(["tiny", "out=~/run"]).out == str(tmp_path / "home/run")
    assert command_words.parse_preset(["tiny", "base=~/run"]).base == str(tmp_path / "home/run")


def test_a_folder_with_an_equals_sign_in_its_name(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run.rename("lr=0.1")
    assert main(["eval", "lr=0.1", "split=test", "mesh=4x2"]) == 0
    assert capsys.readouterr().out.startswith("step 4\n")


def test_show_of_a_run_that_has_adapters(trained, capsys):
    assert main(["show", str(trained), "mesh=4x2"]) == 0
    plain = capsys.readouterr().out
    assert '"seq": 16' in plain
    assert main(["show", "tiny", "mesh=4x2", "lora_rank=2", "lr_rules=*_lora_in=10x"]) == 0
    adapted = capsys.readouterr().out
    assert "lora_in=10x" in adapted
    assert "of them learn: " in adapted.splitlines()[-1]
    assert "of them learn: " not in plain


def test_resuming_says_from_where_and_with_what(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    assert runs.train("--resume", run, "steps=5", "lr=0.5", "decay_steps=9") == 0
    out = capsys.readouterr().out
    assert "resuming from step 4 with steps 4 -> 5, lr 0.001 -> 0.5, decay_steps 40 -> 9\n" in out


def test_a_resume_says_what_more_steps_do_to_the_learning_rate():
    previous = command_words.parse_preset(["shakespeare_cpu", "steps=100", "warmup=10", "lr=3e-3", "lr_min=1e-5"])
    assert train_command.describe_resume(previous, previous.replace(mesh="2x1"), 60).count("\n") == 0
    assert train_command.describe_resume(previous, previous.replace(steps=200, decay_steps=100), 60).count("\n") == 0
    first, rate = train_command.describe_resume(previous, previous.replace(steps=200), 100).splitlines()
    assert first == "resuming from step 100 with steps 100 -> 200"
    assert rate == (
        "learning rate: 1.63e-03 at step 101, where it would have been 1.00e-05; 1.02e-05 at the last step "
        "(the cosine ends at the last step; decay_steps=100 would leave it as it was)"
    )


@pytest.mark.parametrize(
    ("accum", "trained", "mesh", "batch", "rows"),
    [(1, "auto", "8x1", 12, 16), (4, "auto", "8x1", 64, 16), (4, "2x1", "2x1", 8, 2), (3, "4x1", "2x1", 12, 4),
     (1, "6x1", "8x1", 12, 16)],
)  # fmt: skip
def test_any_mesh_can_evaluate_a_run(accum, trained, mesh, batch, rows):
    words = ["tiny", f"mesh={trained}", f"batch={batch}", f"accum={accum}"]
    settings = eval_command.for_evaluation(command_words.parse_preset(words), mesh)
    assert (settings.batch, settings.accum, settings.mesh) == (rows, 1, mesh)


SWALLOWS = """
import signal, sys, types
from shardformer import __main__

class Commands(types.ModuleType):
    def __init__(self):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass  # as where a callback of the garbage collector was running

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "shardformer.cli.show_command":
            Commands()

sys.meta_path.insert(0, Finder())
__main__.main(["show", "tiny"])
"""


def test_ctrl_c_during_the_imports_ends_the_process():
    ended = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "shardformer: interrupted\n")


def test_ctrl_c_during_a_command_ends_the_process_at_once(monkeypatch, capsys):
    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(show_command, "show", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="1"):
        main(["show", "tiny"])
    assert capsys.readouterr().err == "shardformer: interrupted\n"
