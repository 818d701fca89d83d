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
        "import sys; from shardformer import Config, data; data.load_corpus(Config.of(data='builtin')); "
        "print('tensorflow' in sys.modules)"
    )
    assert (ran.stdout, ran.stderr) == ("False\n", "")


def test_batches_of_text_and_events_do_not_import_it(tmp_path):
    ran = _run(
        "import sys; from pathlib import Path; import numpy as np; from shardformer import Config, data\n"
        "from shardformer.logs.events import TensorBoardEvents\n"
        "config = Config.of(data='builtin'); corpus = data.load_corpus(config)\n"
        "next(corpus.train_batches(config, 0, np.arange(2)))\n"
        f"events = TensorBoardEvents(Path({str(tmp_path)!r}), new=True)\n"
        "events.write({'step': 1, 'loss': 2.0}); events.close(); print('tensorflow' in sys.modules)"
    )
    assert (ran.stdout, ran.stderr) == ("False\n", "")
    assert [*tmp_path.iterdir()]


# A stand-in that writes while it loads, as TensorFlow's C++ does, and loads until the program lets it end.
LOADING = """
import os, sys
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
os.write(2, b"I0000 00:00:1795367714.648430    4878 port.cc:153] oneDNN custom operations are on.\\n")
os.write(2, b"2026-01-01 00:00:00.123: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] Unable to "
         b"register cuDNN factory: Attempting to register factory for plugin cuDNN\\n")
os.write(2, b"2026-01-01 00:00:00.123: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:15] failed call to "
         b"cuInit: INTERNAL: CUDA error: Failed call to cuInit: CUDA_ERROR_NO_DEVICE\\n")
sys.loads.set()
sys.may_end.wait(60)
class config: set_visible_devices = staticmethod(lambda *_: None)
"""


def _run_beside_import(tmp_path, program: str) -> subprocess.CompletedProcess:
    """Runs a program while a thread of it imports the stand-in."""
    (tmp_path / "tensorflow.py").write_text(LOADING)
    before = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import os, threading\n"
        "from shardformer.data.tensorflow import import_tensorflow\n"
        "thread = threading.Thread(target=import_tensorflow)\n"
        "sys.loads, sys.may_end = threading.Event(), threading.Event()\n"
        "def end_import():\n"
        "    sys.may_end.set()\n"
        "    thread.join()\n"
        "thread.start(); sys.loads.wait(60)\n"
    )
    return _run(before + program)


def test_an_error_beside_the_import_is_written(tmp_path):
    ran = _run_beside_import(tmp_path, "os.write(2, b'E0000 00:00:1.2    4878 rpc.cc:7] lost\\n')\nend_import()")
    assert (ran.returncode, ran.stderr) == (0, "E0000 00:00:1.2    4878 rpc.cc:7] lost\n")


def test_errors_of_a_gpu_beside_the_import_are_written(tmp_path):
    """XLA's messages, from files that also write noise."""
    lines = (
        "E1122 12:00:00.648430    4878 cuda_executor.cc:1085] failed to allocate 2.00GiB from device: CUDA_ERROR\n"
        "2026-11-22 12:00:00.123: E external/xla/xla/stream_executor/cuda/cuda_dnn.cc:522] Loaded runtime CuDNN library"
        ": 9.1.0\n"
    )
    ran = _run_beside_import(tmp_path, f"os.write(2, {lines.encode()})\nend_import()")
    assert (ran.returncode, ran.stderr) == (0, lines)


def test_a_crash_beside_the_import_is_written(tmp_path):
    ran = _run_beside_import(tmp_path, "os.write(2, b'out of memory\\n')\nos.abort()")
    assert ran.returncode < 0
    assert ran.stderr == "out of memory\n"


def test_an_exit_beside_the_import_is_written(tmp_path):
    ran = _run_beside_import(tmp_path, "os.write(2, b'failed: no such data\\n')\nos._exit(1)")
    assert (ran.returncode, ran.stderr) == (1, "failed: no such data\n")


def test_stderr_is_its_own_again_after_the_import(tmp_path):
    ran = _run_beside_import(tmp_path, "before = os.fstat(2)\nend_import()\nprint(os.fstat(2).st_ino != before.st_ino)")
    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_a_process_without_stderr_imports_it(tmp_path):
    ran = _run_beside_import(
        tmp_path, "end_import()\nimport_tensorflow.cache_clear(); os.close(2); import_tensorflow()"
    )
    assert ran.returncode == 0
