"""Scores and samples of a run during training equal those of the commands on its checkpoints."""

import json
import re
import sys

import jax
import numpy as np
import pytest

from shardformer import session
from shardformer.__main__ import main
from shardformer.data import Corpus
from shardformer.devices import programs
from shardformer.errors import RunError, UsageError
from shardformer.inference import lm_eval_answers
from shardformer.training import monitor
from shardformer.training.monitor import JsonLines, Monitor
from tests import runs, shared
from tests.launch import QUICK_COMPILATION, Forked, finished, free_port
from tests.surroundings import let_fail

PROMPTS = ("the cat", "To be, or")
WORDS = ("tiny", "mesh=2x1", "steps=6", "eval_every=4", "eval_batches=1", "keep_every=2", "ema=0.5", "lr=1e-2",
         "warmup=1", "log_every=1")  # fmt: skip
TRAIN_STEP = "jit(train_step)"
COMPILED = re.compile(r"Finished XLA compilation of (.*) in ")
TASK = """task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: '{{{{question}}}}'
doc_to_choice: '{{{{answers}}}}'
doc_to_target: '{{{{right}}}}'
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture(scope="module")
def observed(tmp_path_factory, text, prompts):
    out = tmp_path_factory.mktemp("observed") / "run"
    assert runs.train(*WORDS, f"data={text}", f"eval_prompts={prompts}", f"out={out}") == 0
    return out


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_texts_equal_those_of_generate(observed, prompts, capsys):
    found = read(observed / "texts.jsonl")
    assert [(line["step"], line["weights"]) for line in found[::2]] == [
        (4, "last"), (4, "average"), (6, "last"), (6, "average")
    ]  # fmt: skip
    capsys.readouterr()
    for weights, ema in (("last", "false"), ("average", "true")):
        words = ["generate", str(observed), f"prompts={prompts}", "step=4", f"ema={ema}", "tokens=64", "temperature=0"]
        assert main([*words, "mesh=2x1"]) == 0
        expected = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
        assert [line["text"] for line in found if line["step"] == 4 and line["weights"] == weights] == expected
    assert len({line["text"] for line in found}) > 1


@pytest.mark.slow
def test_texts_follow_a_resume(tmp_path, text, prompts, observed):
    out = tmp_path / "run"
    words = (*WORDS, f"data={text}", f"eval_prompts={prompts}", f"out={out}")
    assert runs.train(*words, stop_after=5) == 0
    assert runs.train("--resume", out, f"eval_prompts={prompts}") == 0
    assert read(out / "texts.jsonl") == read(observed / "texts.jsonl")
    assert runs.rows(out) == runs.rows(observed)


def train_in_two_processes(devices, *words):
    words = ("train", *words, "processes=2", f"coordinator=localhost:{free_port()}")
    flags = {"XLA_FLAGS": f"{QUICK_COMPILATION} --xla_force_host_platform_device_count={devices}"}
    started = [Forked(*words, f"process_id={i}", environment=flags) for i in (0, 1)]
    results = [finished(process) for process in started]
    assert [status for status, *_ in results] == [0, 0], results


@pytest.mark.nightly
def test_texts_of_two_processes_are_those_of_one(tmp_path, text, prompts, capsys):
    """One process generates from the checkpoint that two have written."""
    out = tmp_path / "run"
    train_in_two_processes(1, *WORDS, f"data={text}", f"eval_prompts={prompts}", f"out={out}")
    capsys.readouterr()
    words = ["generate", str(out), f"prompts={prompts}", "step=4", "tokens=64", "temperature=0", "mesh=2x1"]
    assert main(words) == 0
    expected = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    found = read(out / "texts.jsonl")
    assert [line["text"] for line in found if (line["step"], line["weights"]) == (4, "last")] == expected


@pytest.mark.slow
def test_programs_are_compiled_once(tmp_path, text, prompts, monkeypatch, caplog):
    observe, compiled = Monitor.after_evaluation, []

    def note_compilations(*args):
        compiled.append(COMPILED.findall(caplog.text))
        observe(*args)
        compiled.append(COMPILED.findall(caplog.text))

    monkeypatch.setattr(Monitor, "after_evaluation", note_compilations)
    words = [*WORDS, "weight_decay=0.11"]  # a program that no other test has compiled
    monkeypatch.setattr(programs, "saves_time", lambda: False)  # another thread's log is not seen
    with jax.log_compiles():
        assert runs.train(*words, f"data={text}", f"eval_prompts={prompts}", f"out={tmp_path / 'run'}") == 0
    step_4, step_6 = compiled[:2], compiled[2:]
    assert len(step_4[1]) > len(step_4[0])
    assert step_6 == [step_4[1], step_4[1]]
    assert COMPILED.findall(caplog.text).count(TRAIN_STEP) == 1


@pytest.mark.slow
def test_second_compilation_of_the_step_is_noticed(tmp_path, text, monkeypatch, caplog):
    """The negative twin: the batches of later steps have weights."""
    make = Corpus.train_batches

    def make_batches(corpus, config, first_step, rows):
        for number, batch in enumerate(make(corpus, config, first_step, rows)):
            yield batch | {"weights": np.ones(batch["tokens"].shape, np.float32)} if number else batch

    monkeypatch.setattr(Corpus, "train_batches", make_batches)
    words = ["layers=1", "steps=2", "warmup=1", "eval_every=2", "eval_batches=1", "weight_decay=0.12"]
    monkeypatch.setattr(programs, "saves_time", lambda: False)  # another thread's log is not seen
    with jax.log_compiles():
        assert runs.train("tiny", "mesh=1x1", *words, f"data={text}", f"out={tmp_path / 'run'}") == 0
    assert COMPILED.findall(caplog.text).count(TRAIN_STEP) == 2


@pytest.mark.slow
def test_scores_change_no_step(tmp_path, text, observed):
    assert runs.train(*WORDS, f"data={text}", f"out={tmp_path / 'run'}") == 0
    assert runs.rows(tmp_path / "run") == runs.rows(observed)
    assert not (tmp_path / "run" / "texts.jsonl").exists()


def scored_words(folder) -> list[str]:
    """Writes a task of multiple choice; returns the settings of a run that is scored by it."""
    data = folder / "data.jsonl"
    rows = [{"question": f"the cat {chr(97 + i)}", "answers": ["sat", "ran", "is"], "right": i % 3} for i in range(7)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "choose.yaml").write_text(TASK.format(data=data))
    return [*WORDS, f"eval_tasks={folder / 'tasks' / 'choose'}"]


@pytest.mark.multiprocess
def test_scores_of_two_processes_are_those_of_one(tmp_path, text):
    """The task's rows are split over dp, which crosses the processes; then one process scores the checkpoint."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra `eval`")
    out, results = tmp_path / "run", tmp_path / "results.json"
    words = [word.replace("mesh=2x1", "mesh=4x2") for word in scored_words(tmp_path)]
    train_in_two_processes(4, *words, f"data={text}", f"out={out}")
    found = read(out / "scores.jsonl")
    assert [(line["step"], line["weights"]) for line in found] == [
        (4, "last"), (4, "average"), (6, "last"), (6, "average")
    ]  # fmt: skip
    words = ["harness", str(out), "tasks=choose", f"include={tmp_path / 'tasks'}", f"out={results}", "mesh=4x2"]
    assert main([*words, "step=4"]) == 0
    expected = json.loads(results.read_text())["results"]["choose"]
    assert found[0]["scores"]["choose"] == {k: v for k, v in expected.items() if isinstance(v, (int, float))}


@pytest.mark.slow
def test_scores_equal_those_of_harness(tmp_path, text):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra `eval`")
    out = tmp_path / "run"
    assert runs.train(*scored_words(tmp_path), f"data={text}", f"out={out}") == 0
    found = read(out / "scores.jsonl")
    assert [(line["step"], line["weights"]) for line in found] == [
        (4, "last"), (4, "average"), (6, "last"), (6, "average")
    ]  # fmt: skip
    assert all(line["seconds"] > 0 for line in found)
    for line in found:
        results = tmp_path / f"{line['step']}{line['weights']}.json"
        ema = str(line["weights"] == "average").lower()
        words = ["harness", str(out), "tasks=choose", f"include={tmp_path / 'tasks'}", f"out={results}", "mesh=2x1"]
        assert main([*words, f"step={line['step']}", f"ema={ema}"]) == 0
        expected = json.loads(results.read_text())["results"]["choose"]
        assert line["scores"]["choose"] == {k: v for k, v in expected.items() if isinstance(v, (int, float))}


def test_tasks_need_the_harness(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    assert runs.train(*WORDS, "eval_tasks=x", "data=nowhere", f"out={tmp_path / 'run'}") == runs.USAGE
    assert "eval_tasks needs lm-evaluation-harness: pip install" in capsys.readouterr().err


def test_unknown_tasks_are_found_before_the_data(tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra `eval`")
    assert runs.train(*WORDS, "eval_tasks=arc_esy", "data=nowhere", f"out={tmp_path / 'run'}") == runs.USAGE
    assert "did you mean 'arc_easy'?" in capsys.readouterr().err


def test_tasks_are_opened_before_the_data(tmp_path, monkeypatch, capsys):
    """As above, where the harness is not installed."""

    def reject(listed):
        raise UsageError(f"no such task: {listed}")

    monkeypatch.setattr(lm_eval_answers, "check_installed", lambda _: None)
    monkeypatch.setattr(monitor, "open_tasks", reject)
    assert runs.train(*WORDS, "eval_tasks=arc_esy", "data=nowhere", f"out={tmp_path / 'run'}") == runs.USAGE
    assert "no such task: arc_esy" in capsys.readouterr().err


def test_prompts_are_encoded_before_a_device_starts(tmp_path, monkeypatch, text, capsys):
    def start(*_):
        raise AssertionError("a device started")

    monkeypatch.setattr(session.mesh, "start", start)
    path = tmp_path / "prompts.txt"
    path.write_text("the cat\nthe \u2603\n")
    assert runs.train(*WORDS, f"eval_prompts={path}", f"data={text}", f"out={tmp_path / 'run'}") == runs.USAGE
    assert "eval_prompts: prompt 2: character '\u2603'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("eval_limit=2", "eval_limit does nothing without eval_tasks"),
        ("eval_prompts=nowhere.txt", "eval_prompts=nowhere.txt cannot be read"),
    ],
)
def test_wrong_keys_are_rejected(tmp_path, text, capsys, word, message):
    words = [*WORDS[:3], "eval_every=2", f"data={text}", f"out={tmp_path / 'run'}", word]
    assert main(["train", *words]) == runs.USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_records_after_the_first_step_are_dropped(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"step": 2}\n{"step": 4}\n{"step": 6}\n{"st')
    JsonLines(path, 4).append({"step": 5})
    assert read(path) == [{"step": 2}, {"step": 4}, {"step": 5}]
    JsonLines(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", [b'{"step": 6, "text": "\xc3', b'{"step": 6, "te', b"\xff"])
def test_torn_last_record_is_dropped(tmp_path, torn):
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'{"step": 2}\n' + torn)
    JsonLines(path, 4).append({"step": 5})
    assert read(path) == [{"step": 2}, {"step": 5}]


@pytest.mark.parametrize("line", [b"\xff", b"{", b"[]", b"{}", b'{"step": null}', b"[" * 100_000])
def test_damaged_record_is_named(tmp_path, line):
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'{"step": 2}\n' + line + b"\n")
    with pytest.raises(RunError, match=r"texts.jsonl, line 2, is not a record with a step: .*; remove that line"):
        JsonLines(path, 4)


def test_record_waits_for_a_full_disk(tmp_path):
    path = tmp_path / "texts.jsonl"
    file = JsonLines(path, 0)
    with shared.room(20), pytest.raises(RunError, match=rf"cannot write {path}: "):
        file.append({"step": 1, "text": "long enough for a short write"})
    file.append({"step": 2})
    assert [record["step"] for record in read(path)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_full_disk_obeys_on_save_error(tmp_path, text, prompts, monkeypatch, capsys, policy):
    let_fail(monkeypatch, JsonLines, "append", RunError("cannot write texts.jsonl: No space left on device"))
    words = [*WORDS, f"data={text}", f"eval_prompts={prompts}", f"out={tmp_path / 'run'}", f"on_save_error={policy}"]
    assert runs.train(*words) == (0 if policy == "continue" else runs.FAILED)
    printed = "".join(capsys.readouterr())
    assert ("training continues (on_save_error=continue)" in printed) == (policy == "continue")
    assert printed.count("cannot write texts.jsonl") == 1
    assert list((tmp_path / "run").glob("step_*"))
