"""The options of XLA for GPUs, and the line about a driver that is too old; nvidia-smi is a stand-in."""

import os
import subprocess
import sys

import pytest

from shardformer.devices import gpu
from shardformer.errors import UsageError

H100, V100 = "NVIDIA H100 80GB HBM3, {}, 9.0", "Tesla V100-SXM2-16GB, {}, 7.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns a function that puts GPUs, and JAX's plugin for a version of CUDA, into this machine."""

    def install(*gpus: str, plugin: str = "jax_cuda13_plugin"):
        command = tmp_path / "nvidia-smi"
        command.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in gpus))
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name if name == plugin else None)

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_pipelined_all_gather=false")
    return install


def test_flags_are_set_and_those_of_the_user_stay(machine):
    machine(H100.format("580.65.06"))
    gpu.prepare()
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[0] == "--xla_gpu_enable_pipelined_all_gather=false"
    assert sorted(flags[1:]) == sorted(flag for flag in gpu.FLAGS if "all_gather" not in flag)


def test_nothing_is_set_for_cpu_devices(machine, monkeypatch):
    machine(H100.format("580.65.06"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    gpu.prepare()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_pipelined_all_gather=false"


@pytest.mark.parametrize(
    ("line", "plugin", "message"),
    [
        (H100.format("550.54.15"), "jax_cuda13_plugin", r"needs driver 580 .* 7.5: pip install 'shardformer\[cuda12]'"),
        (H100.format("470.82"), "jax_cuda12_plugin", "needs driver 525 .*: install a driver from 525 on"),
        (V100.format("580.65.06"), "jax_cuda13_plugin", r"capability 7; .*: pip install 'shardformer\[cuda12]'"),
    ],
)
def test_a_gpu_that_does_not_fit_is_named_in_one_line(machine, line, plugin, message):
    machine(line, plugin=plugin)
    with pytest.raises(UsageError, match=message) as caught:
        gpu.prepare()
    assert "\n" not in str(caught.value)


def test_gpus_without_a_plugin_are_named(machine, capsys):
    machine(H100.format("580.65.06"), plugin="none")
    gpu.prepare()
    assert capsys.readouterr().err == (
        "1 NVIDIA GPUs are not used: JAX has no plugin for them; pip install 'shardformer[cuda]'\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "known"), [(gpu.FLAGS, True), (("--xla_gpu_of_no_version=true",), False)])
def test_xla_knows_the_flags(flags, known):
    """XLA ends a process at a flag that it does not know."""
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True)
    assert (done.returncode == 0) == known
