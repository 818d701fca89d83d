"""Eight CPU devices, strict promotion, no network: set before anything touches a device."""

import os

import jax
import pytest

from shardformer import mesh
from tests import runs

# LLVM's optimizations are half of the time that these small programs take to compile, and none of what is tested.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
mesh.use_cpu_devices(8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The path of a corpus small enough to be evaluated whole in a moment."""
    return runs.text(tmp_path_factory.mktemp("text"))
