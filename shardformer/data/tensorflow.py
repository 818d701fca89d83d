"""The import of TensorFlow: only when it is needed, quietly, and never on an accelerator."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

# Copies its input to stderr, without the lines that TensorFlow's C++ writes while it loads. It runs as a child process,
# so that a message before a crash is not lost, and ends with its last writer.
FILTER = r"""
import re, sys
files = (rb"((port|cudart_stub|cuda_diagnostics|cpu_feature_guard|computation_placer)\.cc:\d+\] "
         rb"|cuda_\w+\.cc:\d+\] (Unable to register cu|failed call to cuInit))")
noise = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IWE]\d{4} [\d:. ]+\S*" + files
                   + rb"|\d{4}-\d\d-\d\d [\d:.]+: [IWE] \S*" + files + rb"|To enable the following instructions: ")
for line in iter(sys.stdin.buffer.readline, b""):
    if not noise.match(line.rstrip(b"\r\n")):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""


@functools.cache
def import_tensorflow() -> ModuleType:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _filtered_stderr():
        import tensorflow

        for accelerator in ("GPU", "TPU"):
            # Rejected once its runtime has started: then whoever started it has made this choice already.
            with contextlib.suppress(RuntimeError, ValueError):
                tensorflow.config.set_visible_devices([], accelerator)
    return tensorflow


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Removes TensorFlow's lines about oneDNN and CUDA from stderr; TensorFlow has no setting for this.

    Other threads may write errors in these seconds, so every other line goes on to stderr at once.
    """
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (OSError, AttributeError, ValueError):  # a process without stderr
        yield
        return
    try:
        command = [sys.executable, "-I", "-S", "-c", FILTER]
        filtering = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        os.close(original)
        yield
        return
    assert filtering.stdin is not None
    try:
        os.dup2(filtering.stdin.fileno(), 2)
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)
        filtering.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child of this process may hold its stderr open
            filtering.wait(1)
