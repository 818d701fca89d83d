"""A run folder from a stranger: what its keys and its files make a command open, run or send.

A key of text may name a path, a command or an address. Every stored one is in KEYS, every file of a run in FILES; a new
one fails a test until somebody has looked at what it causes.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.config import FIELDS, LAUNCH_ONLY_KEYS, parsing
from shardformer.convert.hf import copy_tokenizer
from shardformer.data import shakespeare
from shardformer.errors import UsageError
from shardformer.training.run_folder import FOLDERS, Run
from tests import runs

NOTHING = "parsed only: names no path, command or address"
READS = "read, and compared with the fingerprint of vocabulary.json; a bucket gets requests to read, TFDS a data set"
KEYS = {
    "data": READS,
    "validation": READS,
    "tokenizer": "no path is opened: a run has a copy of its tokenizer",
    "chat_template": "the name of a built-in template; the run has a copy of another one",
    "text": "the name of a field",
    "base": "a run that is read, by a resume before the first checkpoint and by convert; never its own base",
    "teacher": "a run whose weights are read, by a start with objective=distill",
    "optimizer": "the name of a built-in one, or own: FILE.py:NAME is damage, and each start names it",
    "out": "replaced by the folder that the command names",
    **dict.fromkeys(
        ("mesh", "rotary_scaling", "window_pattern", "expert_pattern", "lr_rules", "lora_targets", "scale"), NOTHING
    ),
}
# Keys that run code, copy a file, or write elsewhere: each start must name them.
LAUNCHED = {"program_cache", "tracker", "eval_tasks", "eval_prompts", "reward"}

FILES = {
    r"config\.json": "parsed; KEYS has what its values cause",
    r"vocabulary\.json|tokenizer\.json|special_tokens\.json": "parsed; names no other file",
    r"chat_template\.json": "a template: rendered in a process without files, with limits of time and memory",
    r"tokenizer/[^/]*": "known names are copied to a Hugging Face folder, links are not",
    r"(metrics|goodput|skipped|gradients|experts)\.csv": "parsed and written again as a new file",
    r"(scores|texts)\.jsonl": "parsed and written again as a new file",
    r"final\.json": "parsed for a step",
    r"curves\.png": "replaced",
    r"(teacher|reference)\.json": "parsed for a sha256",
    r"references/.*": "numbers, compared with their sha256 and that of the data; a part of another run is not read",
    r"\.lock": "parsed for a host and a process; opened without following a link",
    r"tensorboard/events\..*": "never read; new files are written beside it",
    r"profile/.*": "never read; new files are written beside it",
    r"step_\d{8}/(manifest|config|progress|vocabulary|tokenizer|special_tokens|chat_template)\.json": "parsed",
    r"step_\d{8}/tree\.pkl": "unpickled without any class or function",
    r"step_\d{8}/arrays(_\d+)?\.npy": "numbers",
}
MARK = """import os, pathlib
pathlib.Path(os.environ["MARK"]).write_text("imported")
"""


def stored_texts() -> set[str]:
    stored = [field for name, field in FIELDS.items() if name not in LAUNCH_ONLY_KEYS]
    free = [field for field in stored if field.metadata["takes_code"] or not parsing.choices(field)]
    return {parsing.flat_name(field) for field in free if parsing.plain_type(field.type) is str}


def test_every_stored_key_of_text_is_classified():
    assert stored_texts() == set(KEYS)
    assert set(LAUNCH_ONLY_KEYS) >= LAUNCHED


def test_every_file_of_a_run_is_classified(trained):
    files = [path.relative_to(trained).as_posix() for path in trained.rglob("*") if path.is_file()]
    assert files
    assert not [name for name in files if not any(re.fullmatch(pattern, name) for pattern in FILES)]


def test_every_written_folder_is_searched_for_links():
    """A run does not write its tokenizer/, which a conversion makes; nothing is written in complete checkpoints."""
    written = {pattern.partition("/")[0] for pattern in FILES if "/" in pattern}
    assert written - {r"step_\d{8}", "tokenizer"} == set(FOLDERS)


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """A package lm_eval that leaves a mark when it is imported; returns the path of the mark."""
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(MARK)
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    yield tmp_path / "mark"
    sys.modules.pop("lm_eval", None)


def store(run: Path, **values) -> None:
    """Writes values into the config.json of a run."""
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def attack(run: Path, folder: Path) -> None:
    (folder / "secret").write_text("the password")
    store(run, eval_tasks=str(folder / "x"), eval_prompts=str(folder / "secret"), tracker="lm_eval:x")


def test_stored_tasks_and_prompts_are_ignored_on_resume(run, tmp_path, harness):
    attack(run, tmp_path)
    assert runs.train("--resume", run, "steps=5") == 0
    assert not harness.exists()
    assert not (run / "texts.jsonl").exists()


def test_stored_tasks_are_ignored_in_a_branch(run, tmp_path, harness, monkeypatch):
    attack(run, tmp_path)
    changed = (run / "config.json").read_text()
    read = checkpoint.read_document

    def read_changed(folder, name):  # as a stranger would sign it
        return changed if (folder.parent, name) == (run, "config.json") else read(folder, name)

    monkeypatch.setattr(checkpoint, "read_document", read_changed)
    assert runs.train(f"base={run}/step_4", "steps=5", f"out={tmp_path / 'branch'}") == 0
    assert not harness.exists()
    assert not (tmp_path / "branch" / "texts.jsonl").exists()


def test_given_tasks_import_the_harness(run, harness, capsys):
    """The negative twin."""
    with pytest.raises(ImportError, match="lm_eval"):
        runs.train("--resume", run, "steps=5", "eval_tasks=x")
    assert harness.exists()


@pytest.mark.slow
def test_given_prompts_are_written(run, tmp_path, capsys):
    (tmp_path / "prompts").write_text("to be")
    assert runs.train("--resume", run, "steps=5", f"eval_prompts={tmp_path / 'prompts'}") == 0
    assert "to be" in (run / "texts.jsonl").read_text()
    assert runs.train("--resume", run, "steps=6") == 0
    assert "texts.jsonl is not continued: eval_prompts is never stored in a run" in capsys.readouterr().out


def test_data_without_a_fingerprint_is_asked_for_again(run, tmp_path, capsys):
    """A run without a fingerprint would train on any file that its config.json names."""
    secret = tmp_path / "secret.txt"
    secret.write_text("the password " * 100)
    path = run / "vocabulary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": ""}))
    store(run, data=str(secret))
    assert main(["train", "--resume", str(run), "steps=5"]) == runs.USAGE
    assert f"{run} names data={secret}, but has no fingerprint of it; give data= again" in capsys.readouterr().err


def name_secret_data(run: Path, folder: Path, fingerprint: str) -> Path:
    """Makes a run and its checkpoint name a file of this machine as their data; returns the file."""
    secret = folder / "secret.txt"
    secret.write_text("the password " * 100)
    path = run / "vocabulary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": fingerprint}))
    store(run, data=str(secret))
    return secret


@pytest.fixture
def branch_words(run, tmp_path, monkeypatch):
    """The arguments of a branch of a run whose checkpoint is signed with the run's config.json."""
    read = checkpoint.read_document

    def read_changed(folder, name):
        signed = (folder.parent, name) == (run, "config.json")
        return (run / "config.json").read_text() if signed else read(folder, name)

    monkeypatch.setattr(checkpoint, "read_document", read_changed)
    return ["train", f"base={run}/step_4", "steps=5", f"out={tmp_path / 'branch'}"]


def test_branch_asks_for_data_without_a_fingerprint(run, tmp_path, capsys, branch_words):
    secret = name_secret_data(run, tmp_path, fingerprint="")
    assert main(branch_words) == runs.USAGE
    assert f"{run} names data={secret}, but has no fingerprint of it; give data= again" in capsys.readouterr().err
    assert not (tmp_path / "branch").exists()


@pytest.mark.slow
def test_branch_accepts_named_data_without_a_fingerprint(run, tmp_path, text, branch_words):
    """The negative twin."""
    name_secret_data(run, tmp_path, fingerprint="")
    assert main([*branch_words, f"data={text}"]) == 0


@pytest.mark.parametrize("key", ["data", "validation"])
def test_stored_data_with_another_fingerprint_is_rejected(run, tmp_path, capsys, branch_words, key):
    stored = json.loads((run / "config.json").read_text())["data"]
    fingerprint = json.loads((run / "vocabulary.json").read_text())["fingerprint"]
    secret = name_secret_data(run, tmp_path, fingerprint)
    store(run, **{"data": stored, key: str(secret)})
    for words in (branch_words, ["train", "--resume", str(run), "steps=5"]):
        assert main(words) == runs.USAGE
        assert "is not what" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["huggingface:someone/set", "x/../../y", "kaggle:x:1.0.0", "x/a=b", "https://x/y"])
def test_data_sets_outside_of_tfds_are_rejected(name):
    with pytest.raises(UsageError, match="of a data set in TFDS itself"):
        shakespeare.load_tfds_splits(name, "text")


@pytest.mark.parametrize("name", ["imdb_reviews", "wikipedia/20230601.ace:1.0.0", "tiny_shakespeare:1.0.0"])
def test_names_of_tfds_are_accepted(name):
    assert shakespeare.TFDS_NAME.fullmatch(name)


def test_linked_and_unknown_tokenizer_files_are_not_copied(run, tmp_path):
    (tmp_path / "secret").write_text("the password")
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (run / "tokenizer" / "run_me.py").write_text("")
    os.symlink(tmp_path / "secret", run / "tokenizer" / "special_tokens_map.json")
    copy_tokenizer(Run.open(run), tmp_path / "copied")
    assert [path.name for path in (tmp_path / "copied").iterdir()] == ["tokenizer_config.json"]


LINKED = ["config.json", "metrics.csv", "skipped.csv", "experts.csv", "gradients.csv", "scores.jsonl", "texts.jsonl"]
LINKED += ["curves.png", "final.json", "teacher.json", "reference.json", "reward.json", "tokenizer", ".lock",
           ".step_00000005.tmp-1"]  # fmt: skip
LINKED += ["references", "references/index.json", "references/0123456789ab", "tensorboard", "tensorboard/events.out.1"]
LINKED += ["profile", "profile/plugins/profile", "unknown"]


@pytest.mark.parametrize("target", ["kept", "absent"])
@pytest.mark.parametrize("name", LINKED)
def test_linked_file_of_a_run_is_rejected(run, tmp_path, refused, name, target):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.npy").touch()
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / target)
    refused(runs.USAGE, f"{path} is a link to {tmp_path / target}, and nothing is written or deleted through links; "
            "remove it, or put what it names in its place", "train", "--resume", run, "steps=5")  # fmt: skip


def test_linked_file_in_the_folder_of_a_new_run_is_rejected(tmp_path, refused, text):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tensorboard").symlink_to(tmp_path)
    refused(runs.USAGE, "tensorboard is a link to", "train", "tiny", f"data={text}", f"out={tmp_path / 'new'}")


def test_linked_run_folder_is_resumed(run, tmp_path):
    """The negative twin: the user's own layout."""
    (tmp_path / "checkpoints").symlink_to(run.parent)
    (tmp_path / "checkpoints" / "linked").symlink_to(run.name)
    assert runs.train("--resume", tmp_path / "checkpoints" / "linked", "steps=5") == 0
    assert checkpoint.list_steps(run)[-1] == 5


def test_linked_checkpoint_is_resumed_and_stays(run, tmp_path):
    """A checkpoint on a larger disk is only read."""
    moved = tmp_path / "disk" / "step_00000004"
    shutil.move(run / moved.name, moved)
    (run / moved.name).symlink_to(moved)
    before = {path.name: path.read_bytes() for path in moved.iterdir()}
    assert runs.train("--resume", run, "steps=5", "keep=1") == 0
    assert {path.name: path.read_bytes() for path in moved.iterdir()} == before


def test_dangling_checkpoint_is_rejected(run, tmp_path, refused):
    """The disk may not be mounted: the run would start again from an older step."""
    shutil.rmtree(run / "step_00000004")
    (run / "step_00000004").symlink_to(tmp_path / "absent")
    refused(runs.USAGE, "step_00000004 is a link to", "train", "--resume", run, "steps=5")
