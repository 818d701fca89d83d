"""The shortcuts of tests/launch.py and conftest.py change no result: each has a twin that runs the real thing.

Initial parameters: test_initialisation.py. tf.data: tests/data/test_batches.py. `loads_correctly`:
tests/devices/test_programs.py.
"""

import pytest

from tests import runs
from tests.launch import QUICK, finished, start


@pytest.mark.nightly
def test_quick_command_trains_as_the_installed_one(tmp_path, text):
    """The installed one writes events and prints a sample; both log the same losses."""
    words = ("tiny", "mesh=2x1", f"data={text}", "steps=4", "log_every=1", "eval_every=4", "program_cache=none")
    folders = {"real": ("-m", "shardformer"), "quick": QUICK}
    running = {
        name: start("train", *words, f"out={tmp_path / name}", program=program) for name, program in folders.items()
    }
    printed = {name: finished(process)[1] for name, process in running.items()}
    losses = {name: [row["loss"] for row in runs.rows(tmp_path / name)] for name in folders}
    assert len(losses["real"]) == 4
    assert losses["real"] == losses["quick"]
    has_events = {name: any((tmp_path / name).rglob("events.out.tfevents.*")) for name in folders}
    assert has_events == {"real": True, "quick": False}
    assert "(no sample)" in printed["quick"]
    assert "(no sample)" not in printed["real"]
