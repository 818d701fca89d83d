"""The estimate of bytes beside those of the TPU's compiler, recorded in tpu_bytes.py."""

import pytest

from shardformer.layout import specs, torus
from shardformer.model import Model
from tests.analysis.tpu_bytes import CASES

PARAMETERS = {  # in millions, as published
    "Llama-3-8B": 8030, "Qwen2.5-7B v6e": 7616, "Gemma-2-9B v6e": 9242, "1.5B mp": 1544, "20B mp": 20_555,
    "Mixtral-8x7B": 46_703, "Qwen3-30B-A3B": 30_532,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_estimate_is_within_a_tenth_of_the_compiler(name):
    assert CASES[name].estimate().estimate == pytest.approx(CASES[name].compiled * 1e9, rel=0.10)


def test_twenty_cases_were_not_fitted():
    assert sum(not case.is_fitted for case in CASES.values()) >= 20


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_published_size(name):
    shapes = Model.abstract_parameters(CASES[name].config)
    assert specs.count_parameters(shapes) == pytest.approx(PARAMETERS[name] * 1e6, rel=0.002)


@pytest.mark.slow
def test_estimate_without_padded_heads_is_too_low(monkeypatch):
    """The twin: heads of 64 numbers in rows of 64."""
    monkeypatch.setattr("shardformer.analysis.liveness.LANES", 64)
    case = CASES["350M zero"]
    assert case.estimate().estimate < 0.9 * case.compiled * 1e9


@pytest.mark.slow
def test_exchanges_keep_what_they_send_and_receive(broken):
    case = CASES["Llama-3-8B"]
    exchanging = case.estimate().estimate
    broken(torus, "factor_slice", lambda config, hardware, sizes: ())
    assert case.estimate().estimate < exchanging - 0.02 * case.compiled * 1e9
