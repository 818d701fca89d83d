"""`serve` on the command line: what it starts, what it prints, and newer checkpoints of a run in training."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.__main__ import main
from shardformer.cli import serve_command, served_runs
from shardformer.cli.generation_options import ServeOptions
from shardformer.cli.serve_command import build_service
from shardformer.config.sampling_keys import Sampling
from shardformer.errors import UsageError
from shardformer.inference.serve.jobs import Job
from shardformer.training.run_folder import Run
from tests import runs
from tests.convert.hf_models import FOLDER as HF_FOLDERS
from tests.inference.serve.http_server import send
from tests.launch import SECONDS
from tests.surroundings import before_call, note_exits
from tests.waiting import PATIENCE, wait_for

USAGE = 2
WORDS = ("tiny", "mesh=4x2", "save_every=2", "keep=9")


@pytest.fixture(autouse=True)
def handler_of_sigterm():
    """Restores the handler that the command replaces: a SIGTERM of a later test would raise KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("serve") / "run"
    assert runs.train(*WORDS, f"data={text}", "steps=4", f"out={out}") == 0
    return out


def answer(service, served, prompt=(1, 2, 3)):
    job = Job(0, list(prompt), 0, sampling=Sampling(tokens=5, seed=1), weights=served.served.weights)
    list(service.thread.engine.run([job]))
    return job.ids, job.logprobs


@pytest.mark.slow
def test_newer_checkpoint_reaches_new_requests_only(run, capsys):
    opened = Run.open(run)
    service, (older,) = build_service(opened, ServeOptions(batch=2, step=2, mesh="1x1"))
    engine, before = service.thread.engine, answer(service, older)
    in_flight = Job(0, [1, 2, 3], 0, sampling=Sampling(tokens=5, seed=1), weights=older.served.weights)
    engine.submit(in_flight)
    engine.step(count=1)
    assert older.take_newer()
    assert "step 4 is served" in capsys.readouterr().err
    late = Job(1, [1, 2, 3], 0, sampling=Sampling(tokens=5, seed=1), weights=older.served.weights)
    engine.submit(late)
    while not engine.idle:
        engine.step(count=1)
    assert (in_flight.ids, in_flight.logprobs) == before
    assert (late.ids, late.logprobs) == answer(service, older)
    assert late.logprobs != before[1]
    assert not older.take_newer()


def test_damaged_newest_checkpoint_is_passed_over(run, tmp_path, capsys):
    import shutil

    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / "step_00000004" / "progress.json").write_text("{")
    assert serve_command._find_newest(Run.open(copied)) == 2
    assert "older checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_equal_arrays_of_two_runs_are_stored_once(run):
    options = ServeOptions(batch=2, mesh="1x1", models=f"twin={run}")
    service, (first, twin) = serve_command._open_service(str(run), options)
    assert list(service.models) == ["run", "twin"]
    pairs = zip(*(jax.tree.leaves(one.served.weights.unstacked) for one in (first, twin)), strict=True)
    assert all(mine is other for mine, other in pairs)
    assert answer(service, first) == answer(service, twin)


def convert_here(source, target, *words):
    assert main(["convert", source, str(target), *words]) == 0
    return ""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A Hugging Face folder, a run of adapters of its conversion, and these adapters in PEFT's format."""
    folder = tmp_path_factory.mktemp("adapted")
    source, base, out = HF_FOLDERS / "gpt2", folder / "base", folder / "run"
    convert_here(str(source), base)
    np.tile(np.arange(61), 300).astype("<u2").tofile(folder / "ids.bin")
    words = [f"base={base}", f"data={folder / 'ids.bin'}", "lora_rank=2", "steps=4", "lr=0.1", "batch=8", "mesh=1x1"]
    assert runs.train(*words, f"out={out}") == 0
    convert_here(str(out), folder / "peft", "format=peft")
    return source, base, out, folder / "peft"


@pytest.mark.nightly
def test_adapters_are_served_beside_a_hugging_face_folder(adapted, monkeypatch):
    """Each model has the bits that it has alone, and the weights of the base exist once."""
    source, base, run, published = adapted
    monkeypatch.setattr(served_runs, "convert_in_process", convert_here)
    options = ServeOptions(batch=2, mesh="1x1", models=f"run={run},published={published}")
    service, served = serve_command._open_service(str(source), options)
    assert list(service.models) == ["gpt2", "run", "published"]
    plain, tuned, read_back = (answer(service, one) for one in served)
    for folder, expected in ((base, plain), (run, tuned)):
        alone, (only,) = build_service(Run.open(folder), ServeOptions(batch=2, mesh="1x1"))
        assert answer(alone, only) == expected
    assert tuned != plain
    # PEFT's folder has one adapter of q, k and v, of a larger rank: its products are rounded differently.
    assert read_back[0] == tuned[0]
    np.testing.assert_allclose(read_back[1], tuned[1], rtol=1e-6)
    arrays = [jax.tree.leaves(one.served.weights.unstacked) for one in served]
    assert {id(array) for array in arrays[0]} <= {id(array) for array in arrays[1]} & {id(array) for array in arrays[2]}
    jobs = [Job(i, [1, 2, 3], 0, sampling=Sampling(tokens=5, seed=1), weights=one.served.weights)
            for i, one in enumerate(served)]  # fmt: skip
    list(service.thread.engine.run(jobs))
    assert [(job.ids, job.logprobs) for job in jobs] == [plain, tuned, read_back]


@pytest.mark.slow
def test_folder_of_another_format_is_explained(run, adapted, capsys):
    _, _, _, published = adapted
    assert main(["serve", str(published)]) == USAGE
    assert "serve their base, with models=NAME=" in capsys.readouterr().err
    assert main(["serve", str(run), f"models={adapted[1]}"]) == USAGE
    assert re.search(r"has .*seq=24, .*, and .* has .*seq=16, .*; serve it by itself", capsys.readouterr().err)


def test_command_answers_with_the_text_of_generate(run, tmp_path, capsys, monkeypatch):
    """A client in another thread calls the printed address, as printed, and then stops the server."""
    import uvicorn

    answers, printed = [], []

    class StoppedServer(uvicorn.Server):
        def run(self, sockets):
            printed.append(capsys.readouterr().out)
            self.client = threading.Thread(target=self.call)
            self.client.start()
            super().run(sockets)
            self.client.join(PATIENCE)

        def call(self):
            wait_for(lambda: self.started)
            port = int(re.search(r"127.0.0.1:(\d+)", printed[0])[1])
            body = json.loads(re.search(r"-d '(.*)'", printed[0])[1]) | {"seed": 4, "temperature": 0.8, "logprobs": 0}
            answers.append((body, *send(port, "/v1/completions", body)))
            self.should_exit = True

    monkeypatch.setattr(uvicorn, "Server", StoppedServer)
    assert main(["serve", str(run), "port=0", "mesh=1x1", "batch=3"]) == 0
    ((body, _, content),) = answers
    (tmp_path / "prompts").write_text("The\n")
    words = (
        f"prompts={tmp_path / 'prompts'}",
        f"tokens={body['max_tokens']}",
        "seed=4",
        "batch=3",
        "logprobs=true",
        "mesh=1x1",
    )
    assert main(["generate", str(run), *words]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (choice,) = json.loads(content)["choices"]
    assert choice["text"] == record["text"]
    assert [round(value, 6) for value in choice["logprobs"]["token_logprobs"]] == record["token_logprobs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["port=70000"], "port must be in 0..65535"),
        (["host=0.0.0.0"], "needs a key; give api_key="),
        (["reload=auto", "step=2"], "leave one out"),
        (["reload=always"], "reload"),
        (["timeout=0"], "timeout above 0"),
        (["models=other=nowhere"], "not a run"),
        (["host=no.such.invalid", "api_key=k"], "; give an address of this machine: host=127.0.0.1"),
        (["batch=0"], "batch must be at least 1"),
        (["models=a={run},a=y"], "models=a=y: another model has the name a; give one of them another"),
        (["models=x/run"], "another model has the name run"),
        (["name=b", "models=x/b/"], "another model has the name b"),
        (["allowed_hosts=box,http://box"], "allowed_hosts=http://box is no name of a machine"),
    ],
)
def test_wrong_key_is_rejected(run, words, message, capsys):
    assert main(["serve", str(run), *(word.format(run=run) for word in words)]) == USAGE
    assert message in capsys.readouterr().err


def test_differing_keys_of_another_run_are_named(run):
    opened = Run.open(run)
    other = SimpleNamespace(config=opened.config.replace(layers=3, dtype="bfloat16"), vocabulary=opened.vocabulary)
    message = f"models=X has layers=3, dtype=bfloat16, and {run} has layers=2, dtype=float32; serve it by itself"
    with pytest.raises(UsageError) as caught:
        served_runs.check_other("X", other, opened)
    assert str(caught.value) == message
    other.config = opened.config.replace(lora_rank=2, lr=0.5)
    served_runs.check_other("X", other, opened)


def test_only_a_key_admits_any_host():
    chosen = serve_command._choose_hosts(ServeOptions())
    assert chosen == {"127.0.0.1", "localhost", "::1"}
    assert serve_command._choose_hosts(ServeOptions(allowed_hosts="Box:80,[::2]")) == chosen | {"box", "::2"}
    assert serve_command._choose_hosts(ServeOptions(host="0.0.0.0", api_key="k")) is None
    named = serve_command._choose_hosts(ServeOptions(host="10.0.0.1", api_key="k", allowed_hosts="box"))
    assert named == chosen | {"10.0.0.1", "box"}


def test_port_in_use_is_rejected(run, capsys):
    with serve_command._listen(ServeOptions(port=0)) as taken:
        assert main(["serve", str(run), f"port={taken.getsockname()[1]}"]) == USAGE
    assert "cannot be listened on" in capsys.readouterr().err


@pytest.mark.parametrize("number", serve_command.STOPPING)
def test_signal_that_jax_swallows_ends_the_start(run, number, monkeypatch, tmp_path, capsys):
    def interrupt(*_):
        assert os.listdir(tmp_path)
        with contextlib.suppress(KeyboardInterrupt):  # as where a callback of the garbage collector runs
            signal.raise_signal(number)

    def end(status):
        raise SystemExit(f"status {status}, left {os.listdir(tmp_path)}")

    def go_on(*_):
        raise AssertionError("the start went on")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before_call(monkeypatch, serve_command, "load_model", interrupt)
    before_call(monkeypatch, serve_command, "_announce", go_on)
    note_exits(monkeypatch, end)
    with pytest.raises(SystemExit, match=r"status 1, left \[\]"):
        main(["serve", str(run), "port=0", "mesh=1x1"])
    assert capsys.readouterr().err == "shardformer: interrupted\n"


SERVER = """
import signal
import socket
from types import SimpleNamespace
from shardformer.cli import serve_command
from shardformer.inference.serve.bodies import Limits

async def app(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.complete"})
    print("ready", flush=True)
    await receive()

signal.signal(signal.SIGTERM, signal.default_int_handler)
service = SimpleNamespace(exchanges=[], end_all=None, limits=Limits())
serve_command._run_server(app, service, socket.create_server(("localhost", 0)))
print("ended")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_server_as_a_success(number):
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    assert child.communicate(timeout=SECONDS)[0] == "ended\n"
    assert child.returncode == 0


def test_host_that_is_no_address_is_named():
    with pytest.raises(
        UsageError, match=r"host=no\.such\.host\.invalid .* \(no address has this name\); give an address"
    ):
        serve_command._listen(ServeOptions(host="no.such.host.invalid", api_key="key"))
