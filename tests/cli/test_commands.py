"""What `show`, `eval` and `train --resume` say and decide."""

import json
import shutil

import pytest

from shardformer.__main__ import main
from shardformer.cli import eval_command, train_command
from shardformer.cli import words as command_words
from tests import runs


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


def test_a_run_without_a_number_of_microbatches_is_evaluated():
    settings = command_words.parse_preset(["tiny", "accum=auto", "mesh=1x1"])
    assert eval_command.for_evaluation(settings, "2x1").batch == settings.batch
