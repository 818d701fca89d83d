"""Programs written as the forks of AlphaFold 2 are: the results and gradients of jax 0.4.13.

ALPHAFOLD_FORK names a fork's folder with its `alphafold` package, such as src/AF2 of
https://github.com/patrickbryant1/EvoBind at 1600488, whose results are recorded. Without it that test does not run,
and says so. To record: `python tests/legacy/folding_driver.py old FOLDER tests/legacy/goldens/evobind.npz` with
jax 0.4.13 and dm-haiku 0.0.10.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from shardformer import legacy
from tests.launch import QUICK_COMPILATION
from tests.legacy import folding_program
from tests.legacy.test_gradient_programs import SUMS_OF_AN_ARRAY

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"


def run_program():
    with (
        legacy.installed(legacy_random=True),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        return folding_program.run()


def fork():
    folder = os.environ.get("ALPHAFOLD_FORK")
    if folder is None:
        pytest.skip("did not run: ALPHAFOLD_FORK names no folder with an AlphaFold 2 fork")
    pytest.importorskip("ml_collections", reason="did not run: the fork needs ml_collections")
    return folder


def assert_as_recorded(found, golden):
    assert set(found) == set(golden)
    for name in golden:
        expected = golden[name]
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=atol, err_msg=name)


def test_folding_program_gives_the_recorded_results():
    golden, found = np.load(GOLDENS / "folding_0.4.13.npz"), run_program()
    assert_as_recorded(found, golden)
    found["gradient of the sequence"] = 1.0001 * found["gradient of the sequence"]
    with pytest.raises(AssertionError):
        assert_as_recorded(found, golden)


@pytest.mark.slow
def test_unedited_fork_gives_the_recorded_results(tmp_path):
    out = tmp_path / "out.npz"
    command = [sys.executable, str(HERE / "folding_driver.py"), "legacy", fork(), str(out)]
    environment = os.environ | {"XLA_FLAGS": QUICK_COMPILATION}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found, golden = dict(np.load(out)), dict(np.load(GOLDENS / "evobind.npz"))
    ours, theirs = (arrays.pop("gradients").reshape(-1, SUMS_OF_AN_ARRAY) for arrays in (found, golden))
    assert_as_recorded(found, golden)
    # In float32, gradients that are small sums of larger terms differ by 3e-5 of their scale; some are 0 in truth.
    bound = 5e-5 * np.abs(theirs).max(1, keepdims=True) + 2e-8
    assert np.all(np.abs(ours - theirs) <= bound)
    assert not np.all(np.abs(1.001 * ours - theirs) <= bound)
