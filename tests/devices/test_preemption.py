"""SIGTERM of processes that have joined: JAX's preemption service takes it over, and this package takes it back."""

import signal

import pytest

from tests.launch import Forked, finished, free_port

JOINED = (
    "-c",
    f"""
import os, signal, sys, threading, time
from jax.experimental import multihost_utils
from shardformer import preset
from shardformer.devices import processes

heard = threading.Event()
if "handled" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: heard.set())
processes.join_processes(preset("tiny").override({{"coordinator": "localhost:{free_port()}", "processes": 1}}))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
print("handled:", heard.is_set())
processes.stop_all_processes()
for step in range(2000):
    if multihost_utils.reached_preemption_sync_point(step):
        print("stopped")
        break
    time.sleep(0.1)
""",
)


@pytest.mark.multiprocess
def test_sigterm_ends_a_command_whose_processes_joined():
    assert finished(Forked(program=JOINED))[0] == -signal.SIGTERM


@pytest.mark.multiprocess
def test_sigterm_reaches_its_handler_and_the_service():
    status, printed, _ = finished(Forked("handled", program=JOINED))
    assert (status, printed) == (0, "handled: True\nstopped\n")
