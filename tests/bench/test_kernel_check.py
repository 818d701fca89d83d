"""`bench kernel` passes equal methods of attention, and names one that differs."""

import pytest

from shardformer.bench import kernel_check
from shardformer.bench.bench_options import Measuring
from shardformer.errors import RunError
from tests import shared


def check_one_case() -> None:
    settings = shared.tiny(mesh="1x1", layers=1, attention="blocks")
    kernel_check.bench_kernel(Measuring(), settings, {"causal": {}}, {"float32": 1e-4})


@pytest.mark.slow
def test_equal_methods_of_attention_pass(capsys):
    check_one_case()
    assert "causal  float32" in capsys.readouterr().out


def test_wrong_gradient_of_attention_is_named(monkeypatch):
    results = iter([(2.0, {"w": kernel_check.np.ones(4)}), (2.0, {"w": kernel_check.np.full(4, 1.1)})])
    monkeypatch.setattr(kernel_check, "measure", lambda settings: next(results))
    with pytest.raises(RunError, match=r"causal float32: 9\.1e-02 is above 0\.0001"):
        check_one_case()
