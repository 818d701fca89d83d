"""Commands as processes of their own, and what tells some of them that they belong together."""

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

CACHE_VARIABLE = "SHARDFORMER_TEST_CACHE"  # the folder of compiled programs that conftest.py makes
SECONDS = 240  # more than any of them takes on a busy machine
ROOT = Path(__file__).parents[1]
# The command without what takes seconds of every start: TensorFlow, and the program that samples at the end.
WITHOUT_LUXURY = """
import sys
from unittest import mock
from shardformer.__main__ import main
from shardformer.cli import train_command
from shardformer.training import loop
train_command.sample_text = lambda *_, **__: "(no sample)"
loop.TensorBoardEvents = mock.MagicMock()
"""
QUICK = ("-c", f"{WITHOUT_LUXURY}\nsys.exit(main())")
# A worker of a TPU pod on CPU devices. A pod's mesh may put its hosts' devices in turns along dp.
POD_WORKER = (
    "-c",
    f"""{WITHOUT_LUXURY}
import os
import jax, numpy as np
from shardformer import clusters, mesh
del os.environ["TPU_SKIP_MDS_QUERY"]  # JAX sets it where it finds no TPU
clusters.is_tpu_vm = lambda environment: True
turns = lambda config: np.array(jax.devices()).reshape(2, 2, 2).transpose(1, 0, 2).reshape(config.dp, config.mp)
mesh.make = lambda config: jax.sharding.Mesh(turns(config), mesh.AXES[:2])
sys.exit(main())
""",
)


def cached() -> dict[str, str]:
    """The environment in which a single process shares compiled programs with the tests."""
    return {
        "JAX_COMPILATION_CACHE_DIR": os.environ[CACHE_VARIABLE],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }


def start(*words, environment: dict | None = None, program=("-m", "shardformer")) -> subprocess.Popen:
    command = [sys.executable, *program, *map(str, words)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running after {SECONDS} s: {process.communicate()}")
    return process.returncode, out, error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def metadata_server(worker: int, workers: int, more: dict | None = None):
    """The port of a stand-in for Google's."""
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
    """The environment of each worker of a TPU pod, with a metadata server for each."""
    with contextlib.ExitStack() as stack:
        yield [
            {"GCE_METADATA_IP": f"127.0.0.1:{stack.enter_context(metadata_server(worker, workers))}"}
            for worker in range(workers)
        ]
