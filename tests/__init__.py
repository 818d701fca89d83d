"""The tests. This file is imported before NumPy and torch, which read these variables when they are imported."""

import os

# Two workers use both cores. Further threads of OpenBLAS spin while they wait for a core: with them, the exact
# interpreter took 34 CPU s of test_verify_exact.py's, and 18 without.
os.environ.setdefault("OMP_NUM_THREADS", "1")
