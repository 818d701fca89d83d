"""The records and displays of a run: progress, metrics.csv, TensorBoard events, curves."""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # without a writable home folder it warns in many lines
