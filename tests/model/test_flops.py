"""The arithmetic of a step, counted by hand."""

import numpy as np
import pytest

from shardformer.config.presets import preset
from shardformer.devices import chips
from shardformer.layout import specs
from shardformer.model import Model, flops
from tests import shared


def test_flops_count_causal_attention_once_and_no_embedding():
    config = shared.tiny(mesh="1x1")
    matrices = config.model.layers * (4 * 32 * 32 + 2 * 32 * 128 + 128 + 3 * 32) + 32 * 64 + 64 + 2 * 32
    assert flops.flops_per_token(config) == 6 * matrices + 6 * config.model.layers * config.model.seq * 32
    gptj = preset("gptj_6b")
    assert flops.flops_per_token(gptj) == pytest.approx(6 * 5.85e9 + 6 * 28 * 2048 * 4096, rel=0.01)


def test_attention_has_the_width_of_its_heads():
    config = shared.tiny(mesh="1x1", head_dim=6, qk_norm="head", bias="none")
    matrices = config.model.layers * (4 * 32 * 48 + 2 * 32 * 128 + 32 + 2 * 6) + 32 * 64 + 32
    assert flops.flops_per_token(config) == 6 * matrices + 6 * config.model.layers * config.model.seq * 48
    assert flops.describe_formula(config).endswith("6 x layers x seq x heads x head_dim")


def test_tied_head_multiplies_by_the_table():
    config = shared.tiny(mesh="1x1", tied=True)
    layers = config.model.layers * (4 * 32 * 32 + 2 * 32 * 128 + 128 + 3 * 32)
    head = 32 * 64 + 2 * 32  # the table and the norm
    assert flops.flops_per_token(config) == 6 * (layers + head) + 6 * config.model.layers * config.model.seq * 32


def test_projection_of_the_embedding_multiplies():
    plain, narrow = (shared.tiny(mesh="1x1", tied=True, embed_dim=size) for size in (None, 24))
    head = 2 * 32 * 24 + 24 * 64  # both matrices, and the table
    assert flops.flops_per_token(narrow) - flops.flops_per_token(plain) == 6 * (head - 32 * 64)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_have_no_gradient_of_their_own(tied):
    """2 forward, 2 for the gradient of what they multiply; adapters have 2 more."""
    config = shared.tiny(mesh="1x1", tied=tied, embed="bias" if tied else "plain")
    lora = config.replace(lora_rank=4, lora_targets="q,down")
    attention = 6 * config.model.layers * config.model.seq * 32
    frozen = (flops.flops_per_token(config) - attention) // 6
    adapters = config.model.layers * 4 * ((32 + 32) + (128 + 32))
    assert flops.flops_per_token(lora) == 4 * frozen + 6 * adapters + attention
    layers = config.model.layers * (4 * 32 * 32 + 2 * 32 * 128 + 128 + 3 * 32)
    assert flops.layer_flops_per_token(config) == (6 * layers + attention, 2 * layers + attention // 3)
    step, forward = flops.layer_flops_per_token(lora)
    assert (step, forward) == (4 * layers + 6 * adapters + attention, 2 * (layers + adapters) + attention // 3)


@pytest.mark.slow
def test_experts_count_as_often_as_a_token_uses_them():
    config = shared.tiny(mesh="1x1", bias="none", experts=5, experts_per_token=2, expert_width=24, shared_width=8)
    expert, others = 2 * 32 * 24, 4 * 32 * 32 + 32 * 5 + 2 * 32 * 8 + 32  # attention, router, shared expert, norm
    head = 32 * 64 + 32
    active, total = (config.model.layers * (others + count * expert) + head for count in (2, 5))
    attention = 6 * config.model.layers * config.model.seq * 32
    assert flops.flops_per_token(config) == 6 * active + attention
    assert specs.count_parameters(Model.abstract_parameters(config)) == total + 64 * 32  # and the token table
    mixed = config.replace(dense_first=1, d_ff=40)  # of two layers, one is dense
    dense = 4 * 32 * 32 + 2 * 32 * 40 + 32
    assert flops.flops_per_token(mixed) == 6 * (dense + others + 2 * expert + head) + attention


def test_experts_that_a_token_chooses_are_counted():
    config = shared.tiny(mesh="1x1", bias="none", experts=5, experts_per_token=2, expert_width=24, shared_width=8)
    active = config.model.layers * 2 * 2 * 32 * 24
    assert flops.expert_flops_per_token(config) == (6 * active, 2 * active)
    frozen = config.replace(lora_rank=4)
    assert flops.expert_flops_per_token(frozen) == (4 * active, 2 * active)


def test_adapters_of_experts_count_as_often_as_their_experts():
    experts = {"bias": "none", "experts": 5, "experts_per_token": 2, "expert_width": 24}
    config = shared.tiny(mesh="1x1", **experts)
    adapted = config.replace(lora_rank=4, lora_targets="expert_up")
    frozen = (flops.flops_per_token(config) - 6 * config.model.layers * config.model.seq * 32) // 6
    adapters = config.model.layers * 2 * 4 * (32 + 24)
    attention = 6 * config.model.layers * config.model.seq * 32
    assert flops.flops_per_token(adapted) == 4 * frozen + 6 * adapters + attention


def test_the_formula_is_what_is_counted():
    config = shared.tiny(mesh="1x1")
    assert flops.describe_formula(config) == "6 x multiplying parameters + 6 x layers x seq x d_model"
    words = flops.describe_formula(config.replace(lora_rank=4))
    assert words == "4 x multiplying parameters + 2 x trainable parameters + 6 x layers x seq x d_model"


def test_windows_shorten_attention():
    """Averages the tokens that each token attends to, one by one."""
    config = preset("tiny", vocab=61, layers=3, seq=16, window=4, window_pattern="wf")
    full = config.replace(window=None, window_pattern="")
    attended = [np.minimum(np.arange(1, 17), window or 16).mean() for window in config.model.layer_windows]
    assert [round(x, 3) for x in attended] == [3.625, 8.5, 3.625]
    fewer = flops.flops_per_token(full) - flops.flops_per_token(config)
    assert fewer == pytest.approx(3 * 4 * 32 * 2 * (8.5 - 3.625), rel=0.1)  # the formulas leave out half a token
    assert "window^2 / seq in windowed layers" in flops.describe_formula(config)
    assert flops.flops_per_token(config.replace(window=99)) == flops.flops_per_token(full)


def test_chunks_shorten_attention_more_than_windows():
    """Averages the tokens that each token attends to, one by one."""
    config = preset("tiny", vocab=61, layers=3, seq=20, window=8, window_pattern="wf", window_chunks=True)
    full = config.replace(window=None, window_pattern="", window_chunks=False)
    attended = (np.arange(20) % 8 + 1).mean()
    fewer = flops.flops_per_token(full) - flops.flops_per_token(config)
    assert fewer == pytest.approx(3 * 4 * 32 * 2 * (10.5 - attended), rel=0.03)
    assert "x (window in windowed layers, else seq) x" in flops.describe_formula(config)


def test_peak_is_the_chips_flops_over_the_flops_of_a_token():
    config = shared.tiny(mesh="4x2")
    speed = flops.peak_tokens_per_second(config, chips.CHIPS["v4"])
    assert speed == pytest.approx(8 * 275e12 / flops.flops_per_token(config))
    assert f"{speed:,.0f} tokens/s" in flops.describe_peak(config, chips.CHIPS["v4"])
