"""Grok-1's published code, unedited on today's jax: logits and sampled tokens of jax 0.4.25 and dm-haiku 0.0.12.

GROK_1 names a folder with https://github.com/xai-org/grok-1. Without it these tests do not run, and say so. To record:
`python tests/legacy/grok_driver.py old 1x8 FOLDER tests/legacy/goldens/grok_1x8.npz` with jax 0.4.25, and 2x4 likewise.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert.grok_pickles import read_weight
from tests import tiers
from tests.convert.test_grok import expand, list_weights
from tests.launch import QUICK_COMPILATION

HERE = Path(__file__).parent


@pytest.fixture
def sources():
    folder = os.environ.get("GROK_1")
    if folder is None:
        pytest.skip("did not run: GROK_1 names no folder with Grok-1's code")
    return Path(folder)


def run(sources, mesh, out, keep):
    command = [sys.executable, str(HERE / "grok_driver.py"), "legacy", mesh, str(sources), str(out), str(keep)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILATION}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(np.load(out))


def assert_as_recorded(found, mesh):
    golden = np.load(HERE / "goldens" / f"grok_{mesh}.npz")
    assert set(found) == set(golden)
    scale = np.abs(golden["logits"]).max()
    np.testing.assert_allclose(found["logits"], golden["logits"], rtol=0, atol=3e-6 * scale)
    assert found["best"].tolist() == golden["best"].tolist()
    if "text" in golden:
        assert str(found["text"]) == str(golden["text"])


def assert_files_are_read(folder, mesh):
    """Grok-1's checkpoint.py wrote these files, and `convert` reads from them what the converter's tests give it."""
    expected = [expand(value).astype(np.float32) for value in list_weights(mesh)]
    assert len(list(folder.iterdir())) == len(expected)
    for number, values in enumerate(expected):
        np.testing.assert_array_equal(read_weight(folder / f"tensor{number:05d}_000"), values)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x4", tiers.at_night("1x8")])
def test_unedited_grok_gives_the_recorded_results(sources, mesh, tmp_path):
    found = run(sources, mesh, tmp_path / "out.npz", tmp_path / "checkpoint")
    assert_as_recorded(found, mesh)
    assert_files_are_read(tmp_path / "checkpoint", mesh)
    found["logits"][0, 0, 0] += 1e-4
    with pytest.raises(AssertionError):
        assert_as_recorded(found, mesh)


def test_check_covers_all_names_of_grok(sources, capsys):
    assert main(["legacy", "--check", str(sources)]) == 0
    assert "12 uses of 4 removed names in 4 files; all covered" in capsys.readouterr().out
