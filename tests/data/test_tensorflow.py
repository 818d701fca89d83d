"""TensorFlow comes late, quietly, and without an accelerator."""

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


def test_quiet_and_without_accelerators():
    ran = _run(
        "import sys; from shardformer.data.tensorflow import import_tensorflow; tf = import_tensorflow(); "
        "print(tf.reduce_sum(tf.range(5)).numpy(), tf.config.get_visible_devices('GPU')); "
        "print('heard', file=sys.stderr)"
    )
    assert (ran.stdout, ran.stderr) == ("10 []\n", "heard\n")
