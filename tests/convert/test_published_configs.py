"""Recorded config.json files of published checkpoints: each is accepted, or rejected by the key that is not computed.

Each entry of goldens/published_configs.json names the model and the public text that it was copied from.
"""

import dataclasses
import json

import pytest

from shardformer.config.presets import preset
from shardformer.convert import hf_settings
from shardformer.convert.families import FAMILIES, REJECTED
from shardformer.errors import UsageError
from shardformer.model import Model
from tests.convert.conftest import GOLDENS

PUBLISHED = {entry["model"]: entry for entry in json.loads((GOLDENS / "published_configs.json").read_text())}
ACCEPTED = [model for model, entry in PUBLISHED.items() if "rejected" not in entry]
# Parameters of each model, as its page or its paper gives them, in millions; padding of the vocabulary adds a little.
SIZES = {
    "EleutherAI/gpt-j-6b": 6053, "GPT-J-6B as a GPT-Neo of a fork of transformers": 6053,
    "openai-community/gpt2": 124, "openai-community/gpt2-xl": 1558,
    "distilbert/distilgpt2": 82, "EleutherAI/gpt-neo-125m": 125, "EleutherAI/gpt-neox-20b": 20_555,
    "EleutherAI/pythia-6.9b-deduped": 6857, "EleutherAI/pythia-12b-deduped": 11_846,
    "meta-llama/Llama-2-7b-hf": 6738, "meta-llama/Llama-2-13b-hf": 13_016, "meta-llama/Meta-Llama-3-8B": 8030,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": 8030, "meta-llama/Llama-3.2-1B": 1236,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1100, "HuggingFaceTB/SmolLM2-135M": 134.5, "01-ai/Yi-34B": 34_389,
    "mistralai/Mistral-7B-v0.1": 7242, "mistralai/Mistral-Nemo-Base-2407": 12_248, "google/gemma-2-9b-it": 9242,
    "google/gemma-3-270m": 268, "Qwen/Qwen3-0.6B": 596, "Qwen/Qwen3-1.7B": 1721, "Qwen/Qwen3-8B": 8191,
    "Qwen/Qwen2.5-7B-Instruct": 7616, "Qwen/Qwen2.5-1.5B-Instruct": 1544, "microsoft/Phi-3-mini-4k-instruct": 3821,
    "OLMo 2 7B, instruct": 7299, "facebook/opt-125m": 125, "stabilityai/stablelm-3b-4e1t": 2795,
    "facebook/opt-350m": 331,
    "bigscience/bloom-560m": 559.2, "google/gemma-2b": 2506, "google/gemma-7b": 8538, "microsoft/phi-1_5": 1418,
    "microsoft/phi-2": 2780, "bigcode/starcoder2-15b": 15_958, "microsoft/phi-4": 14_660,
    "microsoft/Phi-3.5-mini-instruct": 3821, "microsoft/Phi-4-mini-instruct": 3836,
    "google/gemma-3-4b-it": 3880, "google/gemma-3-12b-it, copy of unsloth": 11_766, "HuggingFaceTB/SmolLM3-3B": 3075,
    "Granite 3 of 8B, 49,159 tokens": 8171, "allenai/OLMo-1B-hf": 1177, "allenai/Olmo-3.1-32B-Instruct": 32_234,
    "mosaicml/mpt-7b": 6650, "tiiuae/falcon-7b-instruct": 6922, "tiiuae/falcon-40b": 41_300,
    "CohereForAI/aya-23-8B": 8028, "CohereForAI/c4ai-command-r-v01": 34_981, "tiiuae/Falcon3-7B-Instruct": 7456,
    "mistralai/Mixtral-8x7B-v0.1": 46_703, "Qwen/Qwen3-30B-A3B": 30_532, "allenai/OLMoE-1B-7B-0125-Instruct": 6919,
    "Qwen/Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4, without its quantization": 14_316, "LGAI-EXAONE/EXAONE-4.0-32B": 32_003,
    "openai/gpt-oss-20b": 20_915, "openai/gpt-oss-120b": 116_829, "deepseek-ai/DeepSeek-V2-Lite-Chat": 15_706.5,
    "zai-org/GLM-4.7-Flash": 29_943, "tencent/Youtu-LLM-2B": 1961, "facebook/xglm-1.7B": 1733,
    "deepseek-ai/DeepSeek-V2": 235_741, "deepseek-ai/DeepSeek-V3, without its quantization": 671_026,
}  # fmt: skip
ENDS = {
    "EleutherAI/gpt-j-6b": (50256,),
    "EleutherAI/gpt-neox-20b": (2,),
    "EleutherAI/pythia-12b-deduped": (0,),
    "meta-llama/Meta-Llama-3-8B-Instruct": (128009,),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": (128001, 128008, 128009),
}
REPORTED = {
    "distilbert/distilgpt2": {"_num_labels": 1},
    "openai-community/gpt2-medium": {"predict_special_tokens": True},
    "HuggingFaceTB/SmolLM2-135M": {"is_llama_config": True},
    "LLaMA-7B, first conversion": {"max_sequence_length": 2048},
    "EleutherAI/gpt-neox-20b": {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1},
    "EleutherAI/gpt-j-6b": {},
    "google/gemma-2-9b-it": {
        "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window_size": 4096,
    },
    "google/gemma-3-270m": {},
    "openai/gpt-oss-20b": {"experts_per_token": 4, "hidden_act": "silu", "initial_context_length": 4096},
    "facebook/opt-125m": {"prefix": "</s>"},
    "meta-llama/Llama-4-Scout-17B-16E": {},
    "facebook/opt-350m": {"prefix": "</s>"},
    "bigscience/bloom-560m": {
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "offset_alibi": 100,
        "skip_bias_add": True,
    },
}


def read(model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model]["config"]))
    return hf_settings.read_model(tmp_path)


@pytest.mark.parametrize("model", ACCEPTED)
def test_published_config_is_accepted(model, tmp_path):
    found = read(model, tmp_path)
    assert hf_settings.choose_family(found.config, found.family) == found.family


@pytest.mark.parametrize("model", [model for model in PUBLISHED if "rejected" in PUBLISHED[model]])
def test_published_config_is_rejected_by_key(model, tmp_path):
    with pytest.raises(UsageError) as rejection:
        read(model, tmp_path)
    assert PUBLISHED[model]["rejected"] in str(rejection.value)


def test_unknown_family_names_the_known_and_the_way(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "made_up"}')
    with pytest.raises(UsageError) as rejection:
        hf_settings.read_model(tmp_path)
    assert "there are gptj, gpt2, gpt_neo, " in str(rejection.value)
    assert "CONTRIBUTING.md shows how to add a family" in str(rejection.value)


def test_no_family_is_both_computed_and_rejected():
    assert not FAMILIES.keys() & REJECTED.keys()


WINDOWS = {
    "EleutherAI/gpt-neo-125m": (None, 256) * 6,
    "roneneldan/TinyStories-8M": (None, 256) * 4,
    "mistralai/Mistral-7B-v0.1": (4096,) * 32,
    "mistralai/Mistral-Nemo-Base-2407": (None,) * 40,
    "google/gemma-2-9b-it": (4096, None) * 21,
    "microsoft/Phi-3-mini-4k-instruct": (2047,) * 32,
    "Qwen/Qwen2.5-7B-Instruct": (None,) * 28,
    "google/gemma-3-270m": (*[512] * 5, None) * 3,
    "google/gemma-3-4b-it": ((*[1024] * 5, None) * 6)[:34],
    "allenai/Olmo-3.1-32B-Instruct": (4096, 4096, 4096, None) * 16,
    "LGAI-EXAONE/EXAONE-4.0-32B": (4096, 4096, 4096, None) * 16,
    "openai/gpt-oss-20b": (128, None) * 12,
    "meta-llama/Llama-4-Scout-17B-16E": (8192, 8192, 8192, None) * 12,
}


@pytest.mark.parametrize("model", WINDOWS)
def test_published_windows_of_each_layer(model, tmp_path):
    assert read(model, tmp_path).config.model.layer_windows == WINDOWS[model]


@pytest.mark.parametrize(("model", "layers"), [("HuggingFaceTB/SmolLM3-3B", 36), ("LGAI-EXAONE/EXAONE-4.0-32B", 64)])
def test_published_layers_without_rotary(model, layers, tmp_path):
    without = read(model, tmp_path).config.model.layers_without_rotary
    assert without == (False, False, False, True) * (layers // 4)


def test_most_published_configs_are_accepted():
    """Entries with the defaults of a class of transformers are no published files."""
    published = [model for model in PUBLISHED if not PUBLISHED[model]["source"].startswith("defaults of")]
    assert (len(set(ACCEPTED) & set(published)), len(published)) == (95, 98)


SHAPES = {
    "gpt2": "openai-community/gpt2", "gpt2_medium": "openai-community/gpt2-medium",
    "gpt2_xl": "openai-community/gpt2-xl", "llama3_8b": "meta-llama/Meta-Llama-3-8B", "qwen3_0_6b": "Qwen/Qwen3-0.6B",
    "smollm2_135m": "HuggingFaceTB/SmolLM2-135M",
}  # fmt: skip
OF_TRAINING = ("seq", "vocab", "vocab_multiple", "init_std")  # a row may be shorter, a table be padded


def shape(model_keys) -> dict:
    return {name: value for name, value in dataclasses.asdict(model_keys).items() if name not in OF_TRAINING}


@pytest.mark.parametrize("name", SHAPES)
def test_preset_has_the_shape_that_was_published(name, tmp_path):
    ours, published = preset(name).model, read(SHAPES[name], tmp_path).config.model
    assert shape(ours) == shape(published)
    assert ours.seq <= published.seq
    assert ours.vocab == published.vocab


def test_another_shape_is_seen(tmp_path):
    published = read(SHAPES["gpt2"], tmp_path).config.model
    assert shape(preset("gpt2").replace(bias="none").model) != shape(published)
    assert shape(preset("gpt2_medium").model) != shape(published)


@pytest.mark.parametrize(("name", "millions"), [("gpt2_large", 774), ("qwen3_0_6b", 596), ("smollm2_135m", 134.5)])
def test_preset_has_the_parameters_of_its_name(name, millions):
    shapes = Model.abstract_parameters(preset(name))
    assert sum(leaf.size for named in shapes.values() for leaf in named.values()) / 1e6 == pytest.approx(
        millions, rel=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", SIZES)
def test_published_config_has_its_parameters(model, tmp_path):
    config = read(model, tmp_path).config
    count = sum(leaf.size for named in Model.abstract_parameters(config).values() for leaf in named.values())
    assert count / 1e6 == pytest.approx(SIZES[model], rel=0.02)


@pytest.mark.parametrize("model", ENDS)
def test_published_ends_of_text(model, tmp_path):
    assert read(model, tmp_path).special_tokens.ends == ENDS[model]


@pytest.mark.parametrize("model", REPORTED)
def test_published_keys_without_effect_are_reported(model, tmp_path):
    assert read(model, tmp_path).ignored == REPORTED[model]
