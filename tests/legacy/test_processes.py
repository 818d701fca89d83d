"""Two processes: legacy code passes its process's part of every array, and gets its part back."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

SECONDS = 600  # more than it takes on a busy machine
PROGRAM = """
import os, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
import jax, numpy as np
process, address, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, 2, process)
from shardformer import legacy

def body(w, x):
    y = jax.lax.psum(x @ w, "shard")
    return jax.lax.pmean(y.sum(), "batch"), y, w * 2

step = legacy.xmap(
    body,
    in_axes=(["shard", ...], ["batch", "shard", ...]),
    out_axes=([...], ["batch", ...], ["shard", ...]),
    axis_resources={"shard": "mp", "batch": "dp"},
    donate_argnums=0,
)
w = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
x = np.arange(48, dtype=np.float32).reshape(8, 2, 3)[4 * process : 4 * process + 4]  # half of the batch
rows = lambda row: legacy.xmap(lambda z: jax.lax.psum(z, "j") + z, ["j"], ["j"])(row)
nested = legacy.xmap(rows, ["i", ...], ["i", ...], axis_resources={"i": "dp"})
with legacy.Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "mp")):
    inner = nested(x[:, 0])
    assert step.lower(w, x).compile()
    step(w, x)
    mean, y, w = step(step(w, x)[2], x)
np.savez(out, mean=mean, y=y, w=w, inner=inner)
"""


def test_each_process_passes_and_gets_its_part(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM]
    outs = [tmp_path / f"{process}.npz" for process in range(2)]
    running = [
        subprocess.Popen(
            [*command, str(process), address, str(out)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for process, out in enumerate(outs)
    ]
    for process in running:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors[-2000:]

    w = 2 * np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    y = np.einsum("bsi,sio->bo", np.arange(48, dtype=np.float32).reshape(8, 2, 3), w)
    for process, out in enumerate(outs):
        got = np.load(out)
        x = np.arange(48, dtype=np.float32).reshape(8, 2, 3)[4 * process : 4 * process + 4, 0]
        np.testing.assert_array_equal(got["inner"], x + x.sum(1, keepdims=True))
        np.testing.assert_array_equal(got["y"], y[4 * process : 4 * process + 4])
        np.testing.assert_array_equal(got["w"], 2 * w)
        np.testing.assert_allclose(got["mean"], y.sum(1).mean(), rtol=1e-6)
