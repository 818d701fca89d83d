"""Five kinds of tokenizer get the answers of lm-eval's `hf`, which are recorded in goldens/lm_eval.json."""

import dataclasses
import functools
import json

import pytest

from shardformer.__main__ import main
from shardformer.cli.sample_command import load_model, open_codec
from shardformer.cli.text_options import TextOptions, WeightsOptions
from shardformer.inference.lm_eval_answers import Answers, Question
from shardformer.training.run_folder import Run
from tests.inference import lm_eval_kinds
from tests.inference.lm_eval_kinds import KINDS, SETTINGS

pytest.importorskip("tokenizers")
GOLDENS = json.loads(lm_eval_kinds.GOLDENS.read_text())
AS_HARNESS = TextOptions(special_tokens="true")


@pytest.fixture(scope="module")
def open_run(tmp_path_factory):
    """A function that converts the folder of a kind once and opens the run."""
    folder = tmp_path_factory.mktemp("kinds")

    @functools.cache
    def convert(name: str) -> Run:
        source, target = folder / f"hf{len(list(folder.iterdir()))}", folder / f"run{len(list(folder.iterdir()))}"
        lm_eval_kinds.make_folder(KINDS[name], source)
        assert main(["convert", str(source), str(target)]) == 0
        return Run.open(target)

    return convert


def answer(name: str, run: Run, options: TextOptions = AS_HARNESS) -> dict:
    model, params = load_model(run, WeightsOptions())
    answers = Answers(model, params, open_codec(run, options), 4)
    questions = [Question(prompt, SETTINGS) for prompt in lm_eval_kinds.list_prompts(KINDS[name])]
    return {
        "pairs": [(-score.nats, score.greedy) for score in answers.score_pairs(lm_eval_kinds.list_pairs(KINDS[name]))],
        "texts": [-score.nats for score in answers.score_documents(lm_eval_kinds.list_texts(KINDS[name]))],
        "continuations": answers.continue_prompts(questions),
    }


def count_differences(found: dict, expected: dict) -> int:
    pairs = [
        abs(one[0] - other[0]) > 1e-4 or one[1] != other[1]
        for one, other in zip(found["pairs"], expected["pairs"], strict=True)
    ]
    texts = [abs(one - other) > 1e-4 for one, other in zip(found["texts"], expected["texts"], strict=True)]
    continuations = zip(found["continuations"], expected["continuations"], strict=True)
    return sum([*pairs, *texts, *(one != other for one, other in continuations)])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_answers_equal_those_of_hf(open_run, name):
    assert count_differences(answer(name, open_run(name)), GOLDENS[name]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["<s> added"])
def test_without_the_beginning_other_answers_come(open_run, name):
    options = dataclasses.replace(AS_HARNESS, bos="false")
    assert count_differences(answer(name, open_run(name), options), GOLDENS[name]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no bos"])
def test_special_tokens_as_text_give_other_answers(open_run, name):
    options = TextOptions(special_tokens="false")
    assert count_differences(answer(name, open_run(name), options), GOLDENS[name]) > 3
