"""The output and the decisions of `show`, `eval` and `train --resume`."""

import dataclasses
import errno
import json
import os
import re
import shutil
import sys

import pytest

from shardformer import start_messages
from shardformer.__main__ import main
from shardformer.cli import arguments as command_arguments
from shardformer.cli import eval_command, generate_command, sample_command, train_command
from shardformer.layout import mesh
from shardformer.training.run_folder import Run
from tests import runs
from tests.surroundings import let_fail, simulate_failing_processes


@pytest.mark.slow
def test_resume_accepts_a_moved_text(run, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(text, "moved.txt")
    assert runs.train("--resume", "run", "data=moved.txt") == 0
    assert json.loads((run / "config.json").read_text())["data"] == str(tmp_path / "moved.txt")


@pytest.mark.slow
def test_eval_on_another_text(run, tmp_path, text, capsys):
    """Equal texts at two paths give equal losses; another split gives others."""
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


def test_show_and_plan_report_experts(capsys):
    words = ["tiny", "experts=8", "expert_width=16", "bias=none", "mesh=2x4"]
    assert main(["show", *words]) == 0
    shown = capsys.readouterr().out
    total = 2 * (4 * 32 * 32 + 32 * 8 + 8 * 2 * 32 * 16 + 32) + 2 * 72 * 32 + 32
    active = total - 2 * 6 * 2 * 32 * 16  # two of eight experts
    count = f"{total / 1e6:.2f}M parameters, {active / 1e6:.2f}M of them active for a token"
    assert count == "0.03M parameters, 0.02M of them active for a token"
    assert count in shown
    assert "experts, CPU                            ragged_dot is a dense product on cpu" in shown
    assert main(["plan", *words, "compiler=none"]) == 0
    assert count in capsys.readouterr().out
    assert main(["show", "tiny"]) == 0
    assert "active" not in capsys.readouterr().out.rpartition("}")[2]


def test_show_has_the_parameters_of_a_reward_model(capsys):
    words = ["objective=reward", "lr_rules=score=2x", "vocab=4000", "experts=8", "expert_width=16", "bias=none"]
    assert main(["show", "tiny", *words]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"transformer/score/w +32x1 ", shown)
    assert re.search(r"score=2x +1 +32 +score/w", shown)
    assert "transformer/head/w" not in shown
    active = 2 * (4 * 32 * 32 + 32 * 8 + 2 * 2 * 32 * 16 + 32) + 4000 * 32 + 32 + 32
    assert f", {active / 1e6:.2f}M of them active for a token" in shown


@pytest.mark.parametrize(
    ("words", "on_tpu", "on_gpu"),
    [
        ([], "fused      the devices have a kernel", "plain      cuDNN's kernel takes dtype=bfloat16, got float32"),
        (["window=9", "dtype=bfloat16"], *["fused      the devices have a kernel"] * 2),
        (
            ["attention_cap=9", "dtype=bfloat16"],
            "fused      the devices have a kernel",
            "plain      cuDNN's kernel takes no attention_cap",
        ),
        (["attention=plain"], "plain      attention=plain", "plain      attention=plain"),
    ],
)
def test_show_reports_attention_and_its_reason(words, on_tpu, on_gpu, capsys):
    assert main(["show", "tiny", "seq=128", "d_model=64", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("TPU ")).split(maxsplit=1)[1] == on_tpu
    assert next(line for line in lines if line.startswith("NVIDIA GPU")).partition("on  ")[2] == on_gpu


def test_empty_out_is_the_out_of_the_preset(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert command_arguments.parse_preset(["tiny", "out="]).run.out == "checkpoints/tiny"
    assert command_arguments.parse_preset(["tiny", "out=~/run"]).run.out == str(tmp_path / "home/run")
    assert command_arguments.parse_preset(["tiny", "base=~/run"]).training.base == str(tmp_path / "home/run")


def test_run_folder_may_contain_an_equals_sign(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run.rename("lr=0.1")
    assert main(["eval", "lr=0.1", "split=test", "mesh=4x2"]) == 0
    assert capsys.readouterr().out.startswith("step 4\n")


def test_show_reports_adapters(trained, capsys):
    assert main(["show", str(trained), "mesh=4x2"]) == 0
    plain = capsys.readouterr().out
    assert '"seq": 16' in plain
    assert main(["show", "tiny", "mesh=4x2", "lora_rank=2", "lr_rules=*_lora_in=10x"]) == 0
    adapted = capsys.readouterr().out
    assert "lora_in=10x" in adapted
    assert " trainable: " in adapted.splitlines()[-1]
    assert " trainable: " not in plain


@pytest.mark.slow
def test_resume_reports_step_and_changed_keys(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    assert runs.train("--resume", run, "steps=5", "lr=0.5", "decay_steps=9") == 0
    out = capsys.readouterr().out
    assert "resuming from step 4 with steps 4 -> 5, lr 0.001 -> 0.5, decay_steps 40 -> 9\n" in out


def test_resume_reports_a_changed_learning_rate():
    previous = command_arguments.parse_preset(["shakespeare_cpu", "steps=100", "warmup=10", "lr=3e-3", "lr_min=1e-5"])
    assert start_messages.describe_resume(previous, previous.replace(mesh="2x1"), 60).count("\n") == 0
    assert start_messages.describe_resume(previous, previous.replace(steps=200, decay_steps=100), 60).count("\n") == 0
    first, rate = start_messages.describe_resume(previous, previous.replace(steps=200), 100).splitlines()
    assert first == "resuming from step 100 with steps 100 -> 200"
    assert rate == (
        "learning rate: 1.63e-03 at step 101 (1.00e-05 without the change), 1.02e-05 at the last step; "
        "the decay ends at the last step: decay_steps=100 keeps the previous rates"
    )


def test_lbfgs_resume_reports_no_learning_rate():
    previous = command_arguments.parse_preset(["tiny", "optimizer=lbfgs", "clip=0", "weight_decay=0"])
    assert start_messages.describe_resume(previous, previous.replace(steps=80), 20) == (
        "resuming from step 20 with steps 40 -> 80"
    )


def test_resume_after_the_profiled_steps_reports_it():
    previous = command_arguments.parse_preset(["tiny"])
    profiled = previous.replace(profile="5:20")
    assert start_messages.describe_resume(previous, profiled, 20) == (
        "resuming from step 20\nprofile=5:20 traces nothing: the first step now is 21"
    )
    assert start_messages.describe_resume(previous, profiled, 19) == "resuming from step 19"


def test_run_resumes_with_its_own_arguments(trained, tmp_path, monkeypatch):
    """A launcher repeats all arguments; some shells leave a ~ after an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(trained, tmp_path / "run")
    assert (
        runs.train("--resume", "~/run", "out=~/run", "steps=5", "decay_steps=40", "text=text", "pipeline_rounds=1") == 0
    )
    assert (tmp_path / "run/step_00000005").is_dir()


def test_resume_accepts_an_unread_key_of_the_old_run(run):
    settings = json.loads((run / "config.json").read_text()) | {"pipeline_rounds": 2}
    (run / "config.json").write_text(json.dumps(settings))
    opened = train_command.open_session(["--resume", str(run), "pipeline_rounds=2"])
    assert opened.run.config.parallel.pipeline_rounds == opened.previous.parallel.pipeline_rounds == 2


def test_unread_keys_may_repeat_their_defaults():
    for word in ("rotary_theta=10000", "rotary_dims=auto", "pipeline_rounds=1", "text=text"):
        assert command_arguments.parse_preset(["tiny", "mesh=2x1", "positions=none", word])
    assert command_arguments.parse_preset(["tiny", "mesh=2x1x2", "accum=2", "pipeline_rounds=1"])
    assert command_arguments.parse_preset(
        ["tiny", "optimizer=lbfgs", "clip=0", "weight_decay=0", "beta1=0.9", "lr=1e-3"]
    )
    # the values of a preset are not given by the user
    assert command_arguments.parse_preset(["gptj_6b", "positions=none", "optimizer=lbfgs", "clip=0", "weight_decay=0"])


def test_keys_that_are_read_are_accepted():
    for words in (["data=x.jsonl", "text=body"], ["validation=x.jsonl", "text=body"], ["special_tokens=true"],
                  ["special_tokens=true", "tokenizer=bpe:300"],
                  ["rotary_theta=5e5"], ["pipeline_rounds=2"], ["optimizer=muon", "beta1=0.5", "lr=1"],
                  ["base=RUN", "positions=learned", "rotary_dims=2"]):  # fmt: skip
        assert command_arguments.parse_preset(["tiny", *words])


def test_shortened_warmup_is_reported(run):
    opened = Run.open(run)
    for changes, line in (
        (
            {"warmup": 50, "steps": 40, "decay_steps": 20},
            "warmup=50 is shortened to 19 steps, as the rate is lr_min after 20; for a short run, give warmup=2",
        ),
        (
            {"warmup": 2, "steps": 2, "decay_steps": None},
            "warmup=2 is shortened to 1 step, as the rate is lr_min after 2; for a short run, give warmup=1",
        ),
        (
            {"warmup": 100, "steps": 20, "schedule": "constant", "decay_steps": None, "lr": 1e-3},
            "the run ends in its warm-up, at a rate of 2.00e-04: warmup=100 exceeds steps=20; for a short run, "
            "give warmup=2",
        ),
        ({"warmup": 3, "steps": 4, "decay_steps": None}, ""),
    ):
        described = dataclasses.replace(opened, config=opened.config.replace(mesh="4x2", **changes))
        last = start_messages.describe(described).splitlines()[-1]
        assert last == line if line else "warmup" not in last


def test_start_counts_parameters_rather_than_codes(run):
    opened = Run.open(run)
    configs = [opened.config.replace(lora_rank=2, mesh="1x1", weights=form) for form in ("float", "int8", "nf4")]
    lines = {start_messages.describe(dataclasses.replace(opened, config=c)).split(" layers")[0] for c in configs}
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("changes", "steps"), [({"decay": 50}, 17), ({"decay": 17}, 0), ({"decay": None}, 0), ({"schedule": "linear"}, 0)]
)
def test_shortened_decay_is_reported(run, changes, steps):
    settings = Run.open(run).config.replace(
        **{"schedule": "wsd", "warmup": 3, "steps": 20, "decay_steps": None} | changes
    )
    line = f"\ndecay=50 is shortened to {steps} steps between the warm-up and step 20" if steps else ""
    assert start_messages.describe_short_decay(settings) == line


@pytest.mark.parametrize("on_terminal", [True, False])
def test_control_characters_of_a_model_are_escaped_on_a_terminal(monkeypatch, capsys, on_terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    text, escaped = "a\x1b]0;x\x07\x9b\n\tb", "a\\x1b]0;x\\x07\\x9b\n\tb"
    command_arguments.say_text(text)
    terminal = sample_command.Terminal(lambda ids: "".join(map(chr, ids)))
    for character in text:
        terminal(0, [ord(character)])
    expected = escaped if on_terminal else text
    assert capsys.readouterr().out == f"{expected}\n{expected}"


def test_show_chooses_microbatches_for_pipeline_stages(capsys):
    assert main(["show", "tiny", "mesh=2x1x2", "accum=auto"]) == 0
    assert '"accum": 2' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("accum", "trained", "mesh", "batch", "rows"),
    [(1, "auto", "8x1", 12, 16), (4, "auto", "auto", 64, 16), (4, "auto", "8x1", 64, 16),
     (4, "2x1", "2x1", 8, 2), (3, "4x1", "2x1", 12, 4), (1, "6x1", "8x1", 12, 16)],
)  # fmt: skip
def test_any_mesh_can_evaluate_a_run(accum, trained, mesh, batch, rows):
    words = ["tiny", f"mesh={trained}", f"batch={batch}", f"accum={accum}"]
    settings = eval_command.for_evaluation(command_arguments.parse_preset(words), mesh)
    assert (settings.training.batch, settings.training.accum, settings.parallel.mesh) == (rows, 1, mesh)


def test_run_with_accum_auto_can_be_evaluated():
    settings = command_arguments.parse_preset(["tiny", "accum=auto", "mesh=1x1"])
    assert eval_command.for_evaluation(settings, "2x1").training.batch == settings.training.batch


@pytest.mark.parametrize(
    ("command", "fails"),
    [("sample", (sample_command, "load_model")), ("generate", (generate_command, "load_model")),
     ("score", (generate_command, "load_model")), ("eval", (mesh, "start"))],
)  # fmt: skip
def test_failure_of_one_process_ends_all(command, fails, trained, text, monkeypatch):
    let_fail(monkeypatch, *fails, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    ended = []
    simulate_failing_processes(monkeypatch, ended.append)
    more = {"generate": [f"prompts={text}"], "score": [str(text)]}
    main([command, str(trained), *more.get(command, [])])
    assert ended == [
        "process 0 of 2: [Errno 28] No space left on device; start all of them again (to train: train --resume)"
    ]


def test_plan_that_does_not_fit_prints_no_speed_and_no_cost(capsys):
    model = ["tiny", "layers=24", "d_model=2048", "heads=16", "vocab=32000", "seq=1024", "batch=4"]
    words = ["chip=v5e:1x1", "mesh=1x1", "compiler=none", "tokens=1e9", "price=1"]  # few settings to try
    assert main(["plan", *model, *words]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("does not fit: ")
    assert "chip=v5e:2x2" in out.splitlines()[-1]
    for word in ("tokens/s", "MFU", "days", "cost"):
        assert word not in out


def test_plan_prints_its_verdict_before_its_speed(capsys):
    assert main(["plan", "tiny", "chip=v5e:2x4", "mesh=8x1", "compiler=none", "tokens=1e9"]) == 0
    out = capsys.readouterr().out
    assert out.index("fits, as estimated") < out.index("tokens/s") < out.index("days")
