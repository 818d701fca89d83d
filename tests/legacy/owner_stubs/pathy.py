"""The two names that to_hf_weights.py uses, for local paths."""

from pathlib import Path

FluidPath = Path


class Pathy:
    fluid = Path
