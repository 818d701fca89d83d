"""TensorFlow comes late; test_batches.py: quietly, and without an accelerator."""

import os
import subprocess
import sys


def _run(program: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_not_imported_before_batches_are_asked_for():
    ran = _run(
        "import sys; from shardformer import Config, data; data.load_corpus(Config(data='builtin')); "
        "print('tensorflow' in sys.modules)"
    )
    assert (ran.stdout, ran.stderr) == ("False\n", "")
