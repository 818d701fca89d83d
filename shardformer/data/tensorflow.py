"""The one place where TensorFlow is imported: only when it is needed, quietly, and never on an accelerator."""

import contextlib
import functools
import os
import sys


@functools.cache
def import_tensorflow():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _quiet_loading():
        import tensorflow

        for accelerator in ("GPU", "TPU"):
            # Refused once its runtime has started: then whoever started it has made this choice already.
            with contextlib.suppress(RuntimeError, ValueError):
                tensorflow.config.set_visible_devices([], accelerator)
    return tensorflow


@contextlib.contextmanager
def _quiet_loading():
    """While it loads, TensorFlow's C++ writes of oneDNN and CUDA straight to stderr, whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
