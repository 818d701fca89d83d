"""Two processes that train as one, started by hand, by SLURM and on a TPU pod; and the failure of one of them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardformer import checkpoint
from shardformer.devices import programs
from tests import runs
from tests.data.chat.chats import write_lines
from tests.launch import POD_WORKER, QUICK, ROOT, SECONDS, WITHOUT_LUXURY, Forked, finished, free_port, pod
from tests.waiting import wait_for


def losses(out: Path) -> list[float]:
    return [float(row["loss"]) for row in runs.rows(out)]


def processes(*commands, send: signal.Signals | None = None, to: int = 0, program=QUICK):
    """(status, output, error) of processes that start together; one may be signalled once they train."""
    keys = (f"coordinator=localhost:{free_port()}", f"processes={len(commands)}", "start_timeout=600")
    running = [Forked(*words, *keys, f"process_id={i}", program=program) for i, words in enumerate(commands)]
    try:
        if send:
            out = Path(next(word for word in commands[0] if word.startswith("out=")).removeprefix("out="))
            wait_for(lambda: checkpoint.list_steps(out) or running[0].poll() is not None, SECONDS)
            running[to].send_signal(send)
        return [finished(process) for process in running]
    finally:
        for process in running:
            process.kill()


TOGETHER = ("tiny", "layers=1", "mesh=4x2", "steps=6", "decay_steps=8", "eval_every=3", "save_every=3")


@pytest.fixture(scope="module")
def two(tmp_path_factory, text):
    """A run of two tasks of a SLURM job, by scripts/slurm.sh, and what they said."""
    folder = tmp_path_factory.mktemp("two")
    out = folder / "run"
    return out, slurm(folder, *TOGETHER, f"data={text}", f"out={out}")


def slurm(folder: Path, *words) -> list[tuple[int, str, str]]:
    """(status, output, error) of each task of scripts/slurm.sh, with a stand-in for srun."""
    make_environment_that_is_ready(folder / "venv")
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").symlink_to(ROOT / "tests" / "scripts" / "srun")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "VENV": str(folder / "venv"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SRUN_FOLDER": str(folder), "SLURM_JOB_ID": "7", "JAX_COORDINATOR_PORT": str(free_port()),
        "SLURM_SUBMIT_DIR": str(ROOT),
    }  # fmt: skip
    copy = shutil.copy(ROOT / "scripts" / "slurm.sh", folder / "slurm_script")  # as sbatch runs it
    ended = subprocess.run(["bash", copy, *words], env=environment, capture_output=True, text=True, timeout=SECONDS)

    def read(name):
        return (folder / name).read_text()

    tasks = [(int(read(f"{task}.status")), read(f"{task}.out"), read(f"{task}.error")) for task in (0, 1)]
    assert ended.returncode == max(status for status, *_ in tasks)
    return tasks


def make_environment_that_is_ready(folder: Path) -> None:
    """Makes the environment that scripts/environment.sh would install, with quick starts of training."""
    (folder / "bin").mkdir(parents=True)
    (folder / "quick.py").write_text(QUICK[1])
    python = folder / "bin" / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$1 $2" = "-m shardformer" ]; then shift 2; set -- "{folder}/quick.py" "$@"; fi\n'
        f'PYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (folder / ".lock").touch()
    with open(ROOT / "pyproject.toml") as project:
        checksum = subprocess.check_output(["cksum"], stdin=project, text=True).strip()
    (folder / ".has-package").write_text(f"{checksum} Python {sys.version_info[0]}.{sys.version_info[1]} {ROOT}")


@pytest.fixture(scope="module")
def one(tmp_path_factory, text):
    """A run of one process with the same settings, and two more steps."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert runs.train(*TOGETHER, f"data={text}", f"out={out}") == 0
    assert runs.train("--resume", out, "steps=8") == 0
    return out


def check_as_one(out, results, one):
    assert [status for status, *_ in results] == [0, 0], results
    assert "best checkpoint: step" in results[0][1]
    first, second = (set(said.splitlines()) for _, said, _ in results)  # Gloo's greetings, cut by each other, in both
    own = {line for line in first if not re.search(r"\[Gloo]|peer ranks|^[ \d]*$", line)}
    assert len(own) > 10
    assert not own & second  # process 0 alone speaks
    assert checkpoint.list_steps(out) == [3, 6]
    assert checkpoint.read_config(out).parallel.mesh == "4x2"
    assert losses(out) == pytest.approx(losses(one)[:6], rel=1e-6)
    assert len(losses(out)) == 6


@pytest.mark.multiprocess
def test_two_tasks_of_slurm_train_as_one(two, one):
    out, results = two
    check_as_one(out, results, one)
    names = {path.name for path in checkpoint.newest_step_folder(out).glob("arrays*")}
    assert names == {"arrays-00000-of-00002.npy", "arrays-00001-of-00002.npy"}
    for name in ("config.json", "step_00000006/config.json"):
        assert "coordinator" not in (out / name).read_text()


# A command that keeps its programs as on a TPU, and prints the number of those that it has compiled.
COUNTING = (
    "-c",
    f"""{WITHOUT_LUXURY}
import jax
from shardformer.devices import programs
programs.loads_correctly = lambda *_: True
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
status = main()
print("compiled", sum(event.endswith("backend_compile_duration") for event in compiled), file=sys.stderr)
sys.exit(status)
""",
)


@pytest.fixture(scope="module")
def counted(tmp_path_factory, text):
    """A run of two processes with empty folders, and the last line of each one's errors."""
    out = tmp_path_factory.mktemp("counted") / "run"
    command = ("train", *TOGETHER, f"data={text}", f"out={out}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFORMER_CACHE", str(out.parent / "cache"))
        yield out, count_compiled(command)


def count_compiled(command) -> list[str]:
    results = processes(command, command, program=COUNTING)
    assert [status for status, *_ in results] == [0, 0], results
    return [error.splitlines()[-1] for *_, error in results]


@pytest.mark.multiprocess
def test_second_start_of_two_processes_compiles_nothing(counted):
    out, lines = counted
    again = out.parent / "again"
    shutil.copytree(out, again)
    shutil.rmtree(checkpoint.newest_step_folder(again))
    assert count_compiled(("train", "--resume", again)) == ["compiled 0"] * 2
    assert lines == ["compiled 5"] * 2
    assert losses(again) == losses(out)


@pytest.mark.nightly
def test_second_resume_with_changed_keys_compiles_nothing(counted, tmp_path):
    kept = programs.find_folder() / "processes"
    compiled = []
    for name in ("first", "second"):
        shutil.copytree(counted[0], tmp_path / name)
        words = ("lr=1e-4", "steps=8", "skip_steps=6", f"program_cache={kept}")
        compiled.append(count_compiled(("train", "--resume", tmp_path / name, *words)))
    assert compiled[0][0] != "compiled 0"
    assert compiled[1] == ["compiled 0"] * 2


@pytest.mark.nightly
def test_two_workers_with_interleaved_devices_train_as_one(tmp_path, text, one, counted):
    """They use no program that was compiled for devices in order."""
    out, port = tmp_path / "run", {"JAX_COORDINATOR_PORT": str(free_port())}
    kept = programs.find_folder() / "processes"
    words = ("train", *TOGETHER, f"data={text}", f"out={out}", f"program_cache={kept}")
    before = set(kept.glob("jit_train_step-*"))
    with pod(2) as environments:
        workers = [Forked(*words, environment=each | port, program=POD_WORKER) for each in environments]
        check_as_one(out, [finished(worker) for worker in workers], one)
    assert before
    assert len(set(kept.glob("jit_train_step-*")) - before) == 2


# A command that trains twice: its words, "then", and the words of the second run.
TWICE = (
    "-c",
    f"""{WITHOUT_LUXURY}
words, keys = sys.argv[1:-4], sys.argv[-4:]
at = words.index("then")
sys.exit(main([*words[:at], *keys]) or main([*words[at + 1 :], *keys]))
""",
)
SMALL = ("train", "tiny", "layers=1", "steps=2", "log_every=1", "decay_steps=8", "eval_batches=1")


@pytest.mark.nightly
def test_pairs_and_rewards_train_as_one(tmp_path):
    """The tokens of each pair are on devices of both processes, which both read it."""
    pairs = [{"prompt": f"{n}? ", "chosen": f"yes {n}", "rejected": f"no, {n}"} for n in range(60)]
    tasks = [{"prompt": f"{n} ", "completion": "1"} for n in range(10, 99)]
    data = [write_lines(tmp_path / f"{name}.jsonl", found) for name, found in (("pairs", pairs), ("tasks", tasks))]
    commands = (
        (*SMALL, "mesh=dp1.cp4.mp2", "context_parallel=ring", f"data={data[0]}", "tokenizer=bytes", "seq=32",
         "objective=dpo", "batch=8"),
        (*SMALL, "mesh=4x2", "zero=1", f"data={data[1]}", "tokenizer=chars", "seq=8", "objective=grpo",
         "reward=length:3", "answer_tokens=3", "batch=128", "group_size=4", "beta=0.1", "lr=0.01"),
    )  # fmt: skip
    together = [[*words, f"out={tmp_path}/two{n}"] for n, words in enumerate(commands)]
    results = processes(*[(*together[0], "then", *together[1])] * 2, program=TWICE)
    assert [status for status, *_ in results] == [0, 0], results
    for n, (_, *words) in enumerate(commands):
        words = [word for word in words if not word.startswith(("mesh=", "context_parallel="))]
        assert runs.train(*words, "mesh=4x2", f"out={tmp_path}/one{n}") == 0
        expected, found = (read_numbers(tmp_path / f"{name}{n}") for name in ("one", "two"))
        assert len(expected) > 6
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def read_numbers(out: Path) -> list[float]:
    columns = ("loss", "reward_margin", "reward", "kl", "val_loss")
    return [float(row[name]) for row in runs.rows(out) for name in columns if row.get(name)]


# A worker whose clock goes on with each reading, so that it waits as often on a machine of any speed.
WAITING_WORKER = (
    "-c",
    """
import itertools, time, types
from shardformer.devices import rendezvous
readings = itertools.count(0.0, 0.2)
rendezvous.time = types.SimpleNamespace(monotonic=lambda: next(readings), sleep=time.sleep)
"""
    + POD_WORKER[1],
)


@pytest.mark.multiprocess
@pytest.mark.parametrize("alone", [0, 1])
def test_single_worker_prints_at_once_whom_it_waits_for(tmp_path, text, alone):
    words = ("train", *TOGETHER, f"data={text}", f"out={tmp_path}/run", "start_timeout=3")
    port = str(free_port())
    with pod(2) as environments:
        worker = Forked(
            *words, environment=environments[alone] | {"JAX_COORDINATOR_PORT": port}, program=WAITING_WORKER
        )
        status, _, error = finished(worker)
    assert status == 1
    other = f"process {1 - alone} of 2" + (f" at localhost:{port}" if alone else "")
    same = "start the same command on every machine: the TPU pod has 2 processes"
    said = error.splitlines()
    assert re.match(rf"waiting for {other}, for at most [12] s more; {same}", said[0])
    assert said[-1] == f"shardformer: failed: {other} did not answer within 3 s (start_timeout); {same}"


@pytest.mark.slow
def test_one_process_goes_on_with_the_run_of_two_on_another_mesh(tmp_path, two, one):
    out = shutil.copytree(two[0], tmp_path / "run")
    assert runs.train("--resume", out, "steps=8", "mesh=1x8", "scan=true") == 0
    assert losses(out) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.multiprocess
def test_damage_that_one_process_finds_sends_all_back(tmp_path, two, one):
    out = shutil.copytree(two[0], tmp_path / "run")
    folder = checkpoint.step_folder(out, 6)
    leaves = json.loads((folder / "manifest.json").read_text())["leaves"]
    (piece,) = [piece for piece in leaves["params/transformer/layers/q"]["pieces"] if piece["index"][2] == [16, 32]]
    broken, last = folder / piece["file"], piece["offset"] + piece["bytes"] - 1
    raw = broken.read_bytes()
    broken.write_bytes(raw[:last] + bytes([raw[last] ^ 1]) + raw[last + 1 :])
    # On this mesh the second process alone needs those columns.
    results = processes(*[("train", "--resume", str(out), "steps=8", "mesh=1x8")] * 2)
    assert [status for status, *_ in results] == [0, 0], results
    assert f"process 1: {broken} is damaged" in results[0][1]
    assert "and the run goes on from step 3" in results[0][1]
    assert (out / "step_00000006.damaged").is_dir()
    assert checkpoint.list_steps(out)[-2:] == [6, 8]
    assert losses(out) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_is_killed_the_other_ends_and_says_so(tmp_path, text, victim):
    words = ("train", "tiny", "layers=1", "mesh=2x1", "steps=100000", "decay_steps=8", "eval_every=100000",
             "save_every=20", f"data={text}")  # fmt: skip
    results = processes(*[(*words, f"out={tmp_path}/run")] * 2, send=signal.SIGKILL, to=victim)
    assert results[victim][0] == -signal.SIGKILL
    status, _, error = results[1 - victim]
    assert status not in (0, None)
    assert error.splitlines()[-1].startswith(f"shardformer: failed: process {victim} of 2 has died; ")
    assert runs.train("--resume", tmp_path / "run", f"steps={checkpoint.list_steps(tmp_path / 'run')[-1] + 1}") == 0


@pytest.mark.multiprocess
def test_a_folder_that_is_in_use_is_refused_by_all(tmp_path, text):
    words = ("train", "tiny", "mesh=2x1", f"data={text}", f"out={tmp_path}/run")
    with checkpoint.lock_folder(tmp_path / "run"):
        for status, _, error in processes(*[words] * 2):
            assert status == 2
            assert f"{tmp_path}/run is in use by process {os.getpid()}" in error


@pytest.mark.multiprocess
def test_a_signal_stops_all_processes_at_one_step(tmp_path, text):
    """The process that receives the signal answers it at once. Activations go from process to process."""
    out = tmp_path / "run"
    words = ("train", "tiny", "mesh=1x1x2", "accum=2", "steps=100000", "eval_every=100000", "save_every=20")
    results = processes(*[(*words, f"data={text}", f"out={out}")] * 2, send=signal.SIGTERM)
    assert [status for status, *_ in results] == [0, 0], results
    assert f"SIGTERM: stopped after step {checkpoint.list_steps(out)[-1]} of 100000" in results[0][1]
    assert results[0][1].count("SIGTERM: finishing the step in flight, then saving; Ctrl-C now ends at once\n") == 1


@pytest.mark.multiprocess
def test_stop_during_an_evaluation_stops_all_processes(tmp_path, text):
    """An evaluation takes many seconds here. All processes end it before the same batch, and save its step."""
    out, long = tmp_path / "run", tmp_path / "long.txt"
    long.write_text(30 * text.read_text("utf-8"), "utf-8")
    words = ("train", "tiny", "layers=1", "mesh=2x1", "batch=2", "steps=1000", "eval_every=1", "eval_batches=all",
             f"data={long}")  # fmt: skip
    results = processes(*[(*words, f"out={out}")] * 2, send=signal.SIGTERM)
    assert [status for status, *_ in results] == [0, 0], results
    newest = checkpoint.newest_step_folder(out)
    progress = json.loads(checkpoint.read_document(newest, "progress.json"))
    assert progress["unevaluated"]["step"] == progress["step"] == checkpoint.list_steps(out)[-1]
    assert f"stopped after step {progress['step']} of 1000" in results[0][1]
    last = f"steps={progress['step']}"
    assert runs.train("--resume", out, last, "decay_steps=1000", "eval_batches=1", "mesh=2x1") == 0
    assert [int(row["step"]) for row in runs.rows(out) if row["val_loss"]][-1] == progress["step"]


@pytest.mark.slow
def test_processes_that_start_differently_are_told(tmp_path, text):
    words = ("train", "tiny", "mesh=2x1", "steps=6", f"data={text}", f"out={tmp_path}/run")
    (tmp_path / "other.txt").write_text(text.read_text() + "more")
    changes = {"lr=1e-2": "the configuration", f"data={tmp_path}/other.txt": "the content of data="}
    for change, what in changes.items():
        for status, _, error in processes(words, [*(word for word in words if word[:4] != change[:4]), change]):
            assert status == 1
            assert what in error
            assert "differs between the 2 processes" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.multiprocess
def test_processes_without_a_shared_disk_are_told(tmp_path, text):
    words = ("train", "tiny", "layers=1", "mesh=2x1", "steps=6", f"data={text}")
    for status, _, error in processes((*words, f"out={tmp_path}/a"), (*words, f"out={tmp_path}/b")):
        assert status == 1
        assert "must be on a disk that all share or in a bucket" in error
