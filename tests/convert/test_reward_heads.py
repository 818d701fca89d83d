"""Classifiers of Hugging Face with one label are models of rewards: their scores are those of transformers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from shardformer import exact
from shardformer.__main__ import main
from shardformer.analysis import traced
from shardformer.convert import hf_settings, hf_state, reward_heads, runs
from shardformer.convert.families import FAMILIES
from shardformer.data import SpecialTokens
from shardformer.data.prompt_windows import PromptRow
from shardformer.errors import UsageError
from shardformer.inference.generator import Continuation
from shardformer.layout import mesh
from shardformer.objectives.reward_run import RewardOfRun
from shardformer.training.run_folder import Run
from tests import shared, tiers
from tests.convert import reward_models
from tests.convert.hf_models import FOLDER
from tests.convert.reward_models import CLASSES, GOLDENS, LENGTHS, draw_tokens, make_folder
from tests.convert.test_hf import SAME, arrays
from tests.runs import USAGE

RECORDED = json.loads(GOLDENS.read_text())
ON_A_MESH = "qwen3", "gemma2", "phi", "gpt2"  # a tied table, a bound of logits, a bias of the head, learned positions


def compute_scores(folder, lengths=LENGTHS) -> np.ndarray:
    """Returns the scores of the rows on a mesh, in float64, read at the last of `lengths` tokens."""
    family, config = hf_settings.read_config(folder)
    model = traced.make_trainer(config.replace(mesh="2x2", batch=2)).model
    params = runs.nest(model.shapes, {name: np.asarray(leaf) for name, leaf in read(folder, family, config).items()})
    rows = {"tokens": draw_tokens(), "scored": np.zeros((2, max(LENGTHS)), np.float32)}
    rows["scored"][np.arange(2), np.array(lengths) - 1] = 1
    return np.asarray(exact.run(model.score, params, rows).outputs)


def read(folder, family, config) -> dict:
    return hf_state.open_params(folder, family, config, set())


@pytest.mark.parametrize("name", tiers.shorten([*ON_A_MESH, *sorted(CLASSES.keys() - {*ON_A_MESH})], len(ON_A_MESH)))
def test_scores_are_those_of_transformers(name, tmp_path):
    scores = compute_scores(make_folder(name, tmp_path / "model"))
    np.testing.assert_allclose(scores, RECORDED[name], rtol=0, atol=SAME)


def test_score_of_another_token_is_noticed(tmp_path):
    scores = compute_scores(make_folder("qwen3", tmp_path / "model"), (LENGTHS[0], LENGTHS[1] - 1))
    assert np.abs(scores - RECORDED["qwen3"])[1] > 1e-2


@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_there_and_back_is_the_same_class(name, tmp_path, capsys):
    source = make_folder(name, tmp_path / "src")
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    assert Run.open(tmp_path / "run").config.preferences.objective == "reward"
    RewardOfRun(str(tmp_path / "run"))  # raises for a run that gives no rewards
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf", "dtype=bfloat16"]) == 0
    assert arrays(tmp_path / "back") == arrays(source)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: config[key] for key in ("architectures", *reward_models.ONE_LABEL)} == {
        "architectures": [CLASSES[name]]
    } | reward_models.ONE_LABEL
    assert hf_settings.read_config(tmp_path / "back") == hf_settings.read_config(source)


def test_rewards_are_stored_as_codes(tmp_path):
    for words in ([make_folder("phi", tmp_path / "src"), "run"], [tmp_path / "run", "codes", "weights=int8"]):
        assert main(["convert", str(words[0]), str(tmp_path / words[1]), *words[2:]]) == 0
    config = Run.open(tmp_path / "codes").config
    assert (config.preferences.objective, config.stored.weights) == ("reward", "int8")
    RewardOfRun(str(tmp_path / "codes"))  # raises for a run that gives no rewards


@pytest.mark.nightly
def test_converted_run_gives_a_policy_these_rewards(tmp_path):
    assert main(["convert", str(make_folder("qwen3", tmp_path / "src")), str(tmp_path / "run")]) == 0
    config = shared.tiny(objective="grpo", group_size=2, batch=4, answer_tokens=8, seq=32, mesh="1x1")
    source = RewardOfRun(str(tmp_path / "run"))
    source.open(SimpleNamespace(config=config), SimpleNamespace(model=SimpleNamespace(mesh=mesh.make(config))))
    rows = [row[:length].tolist() for row, length in zip(draw_tokens(), LENGTHS, strict=True)]
    prompts, answers = [PromptRow(row[:9], []) for row in rows], [Continuation(row[9:], [], True) for row in rows]
    np.testing.assert_allclose(source.compute(prompts, answers), RECORDED["qwen3"], rtol=0, atol=SAME)


@pytest.mark.parametrize(("padding", "warns"), [(2, True), (0, False)])
def test_padding_that_ends_a_text_is_reported(tmp_path, capsys, padding, warns):
    source = make_folder("llama", tmp_path / "src", pad_token_id=padding, eos_token_id=2)
    (source / "generation_config.json").unlink()
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    said = f"its padding, id {padding}, is an end of text: transformers reads a score before that token"
    assert (said in capsys.readouterr().out) == warns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "has 2 labels, and a reward is one number; expected 1 label"),
        ({"id2label": None}, "has 2 labels, and a reward is one number; expected 1 label"),
        ({"architectures": ["OwnForSequenceClassification"]}, "is not known here; expected Qwen3ForSequenceClassifi"),
    ],
)
def test_other_classifiers_are_rejected(tmp_path, capsys, changes, message):
    source = make_folder("qwen3", tmp_path / "src", **changes)
    assert main(["convert", str(source), str(tmp_path / "run")]) == USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("folder", "objective", "trained"),
    [("reward", "lm", "a reward model"), ("language", "reward", "a language model")],
)
def test_head_of_another_objective_is_rejected(tmp_path, capsys, folder, objective, trained):
    source = make_folder("qwen3", tmp_path / "src") if folder == "reward" else FOLDER / "qwen3"
    assert main(["convert", str(source), str(tmp_path / "run"), f"objective={objective}"]) == USAGE
    assert f"objective={objective} contradicts {source}/config.json, which has {trained}" in capsys.readouterr().err


def test_one_name_of_a_class_is_read_as_a_list_of_it(tmp_path):
    _, config = hf_settings.read_config(make_folder("qwen3", tmp_path / "src", architectures=CLASSES["qwen3"]))
    assert config.preferences.objective == "reward"


def test_family_without_the_class_is_rejected():
    family, config = hf_settings.read_config(FOLDER / "granite")
    theirs = {"model_type": family, "architectures": ["GraniteForSequenceClassification"], "num_labels": 1}
    with pytest.raises(UsageError, match="is no class of transformers for model_type=granite"):
        reward_heads.choose_head(FAMILIES[family], theirs, config)
    with pytest.raises(UsageError, match="no Hugging Face family has objective=reward; the closest, granite, differs"):
        hf_settings.choose_family(config.replace(objective="reward", logits_scale=1.0, tied=False), family)
    assert hf_settings.choose_family(config, family) == family


@pytest.mark.parametrize(
    ("special", "said"),
    [
        (SpecialTokens(ends=(2,)), "it has no padding, so transformers rejects batches of two or more rows"),
        (SpecialTokens(ends=(2,), padding=3, config={"pad_token_id": None}), "it has no padding"),
        (SpecialTokens(ends=(2,), padding=2), "its padding, id 2, is an end of text"),
        (SpecialTokens(ends=(2,), padding=3), ""),
    ],
)
def test_padding_of_a_written_folder_is_reported(special, said):
    line = reward_heads.describe_written_padding(shared.tiny(objective="reward"), special)
    assert said in line
    assert bool(line) == bool(said)
    assert not reward_heads.describe_written_padding(shared.tiny(), special)


def test_scores_of_narrow_embeddings_are_rejected():
    family, config = hf_settings.read_config(FOLDER / "opt_350m")
    theirs = {"model_type": family, "architectures": ["OPTForSequenceClassification"], "num_labels": 1}
    with pytest.raises(UsageError, match="reads its score behind the matrix of word_embed_proj_dim"):
        reward_heads.choose_head(FAMILIES[family], theirs, config)
    with pytest.raises(UsageError, match="has embed_dim=16; the closest, opt, differs there"):
        hf_settings.choose_family(config.replace(objective="reward", tied=False), family)
