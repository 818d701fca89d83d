"""Starts commands as separate processes, and the environment in which several of them train together."""

import atexit
import contextlib
import http.server
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from pathlib import Path

import jax
import pytest

# XLA's fusion emitters and LLVM's optimizations take most of the compile time of these small programs.
# test_parity.py compiles one program with them. XLA ends a process at an unknown flag.
# Splitting a program among compiling threads costs more in all, and two workers use both cores anyway.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
SECONDS = 600  # more than any of them takes on a busy machine
ROOT = Path(__file__).parents[1]
# The command without events and without the sample at the end, which take time in every start.
WITHOUT_LUXURY = """
import gc
import sys
from unittest import mock
from shardformer.__main__ import main
from shardformer.cli import train_command
from shardformer.data import batches
from shardformer.training import outputs, stop_signal
train_command.FinalSample.write = lambda *_: "(no sample)"
train_command.FinalSample.compile = lambda _: None
outputs.TensorBoardEvents = mock.MagicMock()
batches._TfDataBatches = batches._ThreadedBatches
stop_signal.ANNOUNCE_SECONDS = 60  # the line about a signal is printed even if its thread is stopped for a while
gc.freeze()  # see conftest.py
gc.set_threshold(50_000, 20, 50)
"""
QUICK = ("-c", f"{WITHOUT_LUXURY}\nsys.exit(main())")
# A worker of a TPU pod on CPU devices. A pod's mesh may interleave its hosts' devices along dp.
POD_WORKER = (
    "-c",
    f"""{WITHOUT_LUXURY}
import os
import jax, numpy as np
from shardformer.devices import clusters
from shardformer.layout import mesh
from shardformer.devices import programs
programs.loads_correctly = lambda *_: True
del os.environ["TPU_SKIP_MDS_QUERY"]  # JAX sets it where it finds no TPU
clusters.is_tpu_vm = lambda environment: True
def make(config):
    interleaved = np.array(jax.devices()).reshape(2, 2, 2).transpose(1, 0, 2)
    return jax.sharding.Mesh(interleaved.reshape(config.parallel.dp, config.parallel.mp), ('dp', 'mp'))
mesh.make = make
sys.exit(main())
""",
)


def start(*words, environment: dict | None = None, program=("-m", "shardformer")) -> subprocess.Popen:
    command = [sys.executable, *program, *map(str, words)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


class Forked:
    """A process like that of `start` with a "-c" program, forked from one that has imported JAX.

    A command's imports take two seconds of a core. Environment variables that JAX reads at import have no effect.
    """

    def __init__(self, *words, environment: dict | None = None, program=QUICK):
        _start_server_to_fork()
        self._said = Path(tempfile.mkdtemp(prefix="shardformer-said-"))
        outputs = [self._said / name for name in ("out", "error")]
        for path in outputs:
            path.touch()
        given = (program[1], [*map(str, words)], os.environ | (environment or {}), outputs)
        self._process = multiprocessing.get_context("forkserver").Process(target=_be_command, args=given, daemon=True)
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Returns its output and its errors once it has ended."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        said = tuple((self._said / name).read_text() for name in ("out", "error"))
        shutil.rmtree(self._said)
        return said


def _start_server_to_fork() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.launch", "shardformer.cli.train_command"])
    with contextlib.chdir(ROOT):  # where it finds both
        forkserver.ensure_running()


def _be_command(code: str, words: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    """Runs `-c CODE WORDS` as Python does, with the exit functions that multiprocessing leaves out.

    Since Python 3.13 a forked process loses the functions that were registered before the fork, JAX's among them. A
    process that ends without it does not wait for the others, and JAX 0.12 aborts those once process 0 has ended.
    """
    for descriptor, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    jax.config.update("jax_platforms", "cpu")
    sys.argv = ["-c", *words]
    try:
        exec(compile(code, "<command>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
        jax.distributed.shutdown()


def finished(process: subprocess.Popen | Forked) -> tuple[int, str, str]:
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running after {SECONDS} s: {process.communicate()}")
    return process.returncode, out, error


def connect_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a TCP connection; socket.socketpair has other options."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        return first, server.accept()[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def metadata_server(worker: int, workers: int, more: dict | None = None):
    """Yields the port of a stand-in for Google's metadata server."""
    endpoints = ",".join(["localhost"] * workers)
    attributes = {"agent-worker-number": worker, "worker-network-endpoints": endpoints, "tpu-env": "TYPE: 'v4-16'\n"}
    attributes |= more or {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            known = self.headers["Metadata-Flavor"] == "Google" and name in attributes
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(str(attributes[name]).encode() if known else b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextlib.contextmanager
def pod(workers: int):
    """Yields the environment of each worker of a TPU pod, with a metadata server for each."""
    with contextlib.ExitStack() as stack:
        yield [
            {"GCE_METADATA_IP": f"127.0.0.1:{stack.enter_context(metadata_server(worker, workers))}"}
            for worker in range(workers)
        ]
