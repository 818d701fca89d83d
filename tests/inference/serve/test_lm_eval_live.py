"""lm-eval's `local-completions` on the server gives the results of `harness`; skipped where it is not installed."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra `eval`")
pytest.importorskip("tenacity", reason="lm-eval's clients of servers are not installed: pip install lm-eval[api]")
pytest.importorskip("transformers", reason="lm-eval's client reads its tokenizer with transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.data.chat.chatml_bytes import make_vocabulary
from tests.inference import test_generator
from tests.inference.serve.http_server import SIZES, make_service, running

QUESTIONS = [
    {"question": "where did the cat sit?", "answers": ["on the mat", "there", "a"], "right": 0},
    {"question": "é, ü and 😀 are", "answers": ["letters", "é", "zebra"], "right": 1},
    {"question": "the", "answers": ["cat", "mat", "sat"], "right": 2},
]
COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{answers}}'\n"
    "doc_to_target: '{{right}}'\n",
    "write": "output_type: generate_until\ndoc_to_text: 'Q: {{question}}'\ndoc_to_target: '{{answers[0]}}'\n"
    "generation_kwargs:\n  until: ['.', 'sat']\n  max_gen_toks: 6\n  do_sample: false\n"
    "metric_list:\n  - metric: exact_match\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tasks with their data, and the tokenizer as transformers reads it."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, words in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(data=data)}{words}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(make_vocabulary().text)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def answers(results) -> dict:
    """Returns the log-likelihoods or the text of each question, by task and number."""

    def read(task, resps):
        return [resp[0] if task == "write" else float(resp[0][0]) for resp in resps]

    return {
        (task, row["doc_id"]): read(task, row["resps"]) for task, rows in results["samples"].items() for row in rows
    }


def count_differences(found: dict, expected: dict) -> int:
    assert found.keys() == expected.keys()
    same = [found[key] == (value if key[0] == "write" else pytest.approx(value, rel=1e-6))
            for key, value in expected.items()]  # fmt: skip
    return same.count(False)


def test_results_are_those_of_the_harness(folder):
    from lm_eval import evaluator

    from shardformer.inference.lm_eval_adapter import evaluate, find_tasks
    from shardformer.inference.lm_eval_answers import Answers

    service, names, params = make_service(), list(TASKS), test_generator.parameters(**SIZES)
    manager = find_tasks(names, [str(folder)])
    with running(service) as port:
        settings = {"base_url": f"http://127.0.0.1:{port}/v1/completions", "model": "small",
                    "tokenizer": str(folder / "tokenizer"), "max_length": SIZES["seq"] - 1}  # fmt: skip
        found = evaluator.simple_evaluate("local-completions", settings, names, task_manager=manager)

    def ask_harness(params):
        return evaluate(Answers(test_generator.model(**SIZES), params, service.codec, 2), manager, names)

    expected = ask_harness(params)
    assert count_differences(answers(found), answers(expected)) == 0
    for task, metrics in expected["results"].items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert {name: found["results"][task][name] for name in numbers} == pytest.approx(numbers, rel=1e-6)
    other = ask_harness(jax.tree.map(lambda leaf: leaf * np.asarray(1.001, leaf.dtype), params))
    assert count_differences(answers(found), answers(other)) > 0
