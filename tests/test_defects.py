"""A negative twin whose defect is never executed fails."""

import pytest

from shardformer import files
from tests.defects import Defects


def test_defect_that_is_never_called_is_noticed(monkeypatch):
    defects = Defects(monkeypatch)
    defects(files, "expand_home", lambda path: f"{path}!")
    with pytest.raises(AssertionError, match=r"broken and never called: shardformer\.files\.expand_home"):
        defects.check()
    assert files.expand_home("run") == "run!"
    defects.check()
