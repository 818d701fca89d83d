"""The text model inside a model of text and images, such as Gemma 3 and Mistral Small 3, is the model of text."""

import json
import shutil

import numpy as np
import pytest

from shardformer.convert import hf_settings, safetensors_files, weight_files
from shardformer.errors import UsageError
from tests.convert.hf_models import FOLDER
from tests.convert.test_hf import arrays, convert, edit, params_of

SOURCE = FOLDER / "gemma3"


def wrap(folder, prefix, others, **changes):
    """Writes the recorded Gemma 3 into a wrapper with arrays of a vision model."""
    folder.mkdir()
    text = json.loads((SOURCE / "config.json").read_text())
    ids = {key: text.pop(key) for key in list(text) if key.endswith("_token_id")}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}, "image_token_index": 60}
    (folder / "config.json").write_text(json.dumps(outer | ids | changes))
    tensors = weight_files.find_tensors(SOURCE)
    made = [
        safetensors_files.CreatedTensor(prefix + name.removeprefix("model."), tensor.dtype, tensor.shape, tensor.read)
        for name, tensor in tensors.items()
    ]
    patch = np.ones((4, 4), np.float32)
    made += [safetensors_files.CreatedTensor(name, patch.dtype, patch.shape, lambda: patch) for name in others]
    safetensors_files.write_tensors(folder, made, 10**9)
    return folder


OLDER = "language_model.model.", ("vision_tower.patch.weight", "multi_modal_projector.weight")
NEWER = "model.language_model.", ("model.vision_tower.patch.weight", "model.multi_modal_projector.weight")


MISTRAL = {"model_type": "mistral3", "image_token_index": 10, "projector_hidden_act": "gelu", "spatial_merge_size": 2}


def wrap_mistral(folder, name, changes_of_text=None, **changes):
    """Writes a recorded model without a head of its own into a Mistral 3 of text and images."""
    text = json.loads((FOLDER / name / "config.json").read_text()) | (changes_of_text or {})
    shutil.copytree(FOLDER / name, folder)
    outer = MISTRAL | {"text_config": text, "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1}
    (folder / "config.json").write_text(json.dumps(outer | changes))
    return folder


@pytest.mark.parametrize("name", ["mistral", "ministral3", "mistral4"])
def test_text_model_of_a_mistral_3_is_read(name, tmp_path):
    folder = wrap_mistral(tmp_path / "src", name)
    assert hf_settings.read_config(folder) == hf_settings.read_config(FOLDER / name)
    assert hf_settings.read_config(folder)[0] == name


def test_text_model_of_a_mistral_3_is_a_mistral_without_a_type(tmp_path):
    text = json.loads((FOLDER / "mistral" / "config.json").read_text())
    del text["model_type"]
    folder = wrap_mistral(tmp_path / "src", "mistral", text_config=text, tie_word_embeddings=True)
    family, config = hf_settings.read_config(folder)
    assert (family, config.model.tied) == ("mistral", False)  # the text model's, as the published files have a head


def test_a_mistral_3_whose_keys_of_a_head_contradict_is_rejected(tmp_path):
    text = json.loads((FOLDER / "mistral" / "config.json").read_text()) | {"tie_word_embeddings": True}
    folder = wrap_mistral(tmp_path / "src", "mistral", text_config=text, tie_word_embeddings=False)
    with pytest.raises(UsageError, match="tie_word_embeddings=False of mistral3 contradicts"):
        hf_settings.read_config(folder)


def test_other_text_models_of_a_mistral_3_are_named(tmp_path):
    folder = wrap_mistral(tmp_path / "src", "mistral", {"model_type": "llama"})
    with pytest.raises(UsageError, match="expected an object of model_type=mistral or ministral3 or mistral4"):
        hf_settings.read_config(folder)


def test_text_model_of_a_llama_4_is_read(tmp_path):
    source, folder = FOLDER / "llama4", tmp_path / "src"
    folder.mkdir()
    outer = {"model_type": "llama4", "text_config": json.loads((source / "config.json").read_text())}
    (folder / "config.json").write_text(json.dumps(outer | {"vision_config": {}, "boi_token_index": 9}))
    patch = safetensors_files.CreatedTensor("vision_model.patch", np.dtype("float32"), (2,), lambda: np.ones(2, "f4"))
    tensors = weight_files.find_tensors(source).items()
    made = [
        safetensors_files.CreatedTensor(f"language_model.{name}", tensor.dtype, tensor.shape, tensor.read)
        for name, tensor in tensors
    ]
    safetensors_files.write_tensors(folder, [patch, *made], 10**9)
    assert hf_settings.read_config(folder) == hf_settings.read_config(source)
    found, expected = params_of(folder), params_of(source)
    assert {name: leaf.tobytes() for name, leaf in found.items()} == {n: e.tobytes() for n, e in expected.items()}
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(UsageError, match="tie_word_embeddings=True is not computed in a llama4"):
        hf_settings.read_config(folder)


@pytest.mark.parametrize("names", [OLDER, NEWER], ids=["transformers 4", "transformers 5"])
def test_text_model_of_a_wrapper_is_read(names, tmp_path):
    folder = wrap(tmp_path / "src", *names)
    assert hf_settings.read_config(folder) == hf_settings.read_config(SOURCE)
    found, expected = params_of(folder), params_of(SOURCE)
    assert {name: leaf.tobytes() for name, leaf in found.items()} == {n: e.tobytes() for n, e in expected.items()}
    assert convert(folder, tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=hf", "dtype=bfloat16") == 0
    assert arrays(tmp_path / "back") == arrays(SOURCE)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "gemma3_text"


def test_vision_arrays_without_a_wrapper_are_rejected(tmp_path):
    folder = wrap(tmp_path / "src", "model.", ("vision_tower.patch.weight",))
    shutil.copy(SOURCE / "config.json", folder / "config.json")
    with pytest.raises(UsageError, match=r"has vision_tower.patch.weight, which no gemma3_text model"):
        params_of(folder)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("text_config=None is not computed here", {"text_config": None}),
        ("text_config={'model_type': 'llama'} is not computed here", {"text_config": {"model_type": "llama"}}),
        (
            "final_logit_softcapping=30.0 is not computed in a",
            {"text_config": {"final_logit_softcapping": 30.0}},
        ),
        ("tie_word_embeddings=False is not computed in a gemma3", {"tie_word_embeddings": False}),
        ("audio_config={'a': 1} is not known here", {"audio_config": {"a": 1}}),
        ("text_config='x' is not computed here", {"text_config": "x"}),
    ],
)
def test_wrapper_that_is_not_computed_is_named(message, changes, tmp_path):
    folder = wrap(tmp_path / "src", *NEWER, **changes)
    with pytest.raises(UsageError) as rejection:
        hf_settings.read_config(folder)
    assert message in str(rejection.value)


def test_token_ids_of_the_wrapper_are_kept(tmp_path):
    folder = wrap(tmp_path / "src", *NEWER)
    edit(folder, eos_token_id=[1, 6], bos_token_id=2)
    special = hf_settings.read_model(folder).special_tokens
    assert (special.first, special.ends) == (2, (1, 6))
