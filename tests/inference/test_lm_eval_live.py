"""Answers equal those of lm-evaluation-harness's model `hf`, if it is installed (pip install lm-eval[hf])."""

import json

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.data import hf_tokenizer
from tests.convert import hf_models
from tests.inference import lm_eval_kinds
from tests.inference.test_lm_eval_kinds import count_differences

pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra `eval`")
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 300
TEXT = "the cat sat on the mat, and the other cats that sat there thought that this was their mat. "
QUESTIONS = [
    {"question": "where did the cat sit?", "answers": ["on the mat", "there", "the other"], "right": 0},
    {"question": TEXT, "answers": ["mat", "cats", "that sat on the mat"], "right": 1},  # longer than the context
    {"question": "", "answers": ["the", "cat", "zebra \u00e9"], "right": 2},
]
COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{answers}}'\n"
    "doc_to_target: '{{right}}'\n",
    "read": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{question}} {{answers[0]}}'\n"
    "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n",
    "write": "output_type: generate_until\ndoc_to_text: 'Q: {{question}}'\ndoc_to_target: '{{answers[0]}}'\n"
    "generation_kwargs:\n  until: ['.', 'sat']\n  max_gen_toks: 6\n  do_sample: false\n"
    "metric_list:\n  - metric: exact_match\n",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Hugging Face folder with its tokenizer, the run that it is converted to, and tasks."""
    folder = tmp_path_factory.mktemp("live")
    text = hf_tokenizer.train_bpe([TEXT * 3], VOCAB).text
    hf_models.make_model("gpt2", vocab_size=VOCAB).save_pretrained(folder / "src")
    (folder / "tokenizer.json").write_text(text)
    end = {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "pad")}
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **end).save_pretrained(
        folder / "src"
    )
    assert main(["convert", str(folder / "src"), str(folder / "run")]) == 0
    (folder / "tasks").mkdir()
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, words in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(data=data)}{words}")
    return folder


def responses(samples) -> dict:
    """Returns the model's answers by task and document."""
    return {(task, row["doc_id"]): row["resps"] for task, rows in samples.items() for row in rows}


def ours(folders, *words) -> dict:
    out = folders / "results.json"
    command = ["harness", folders / "run", f"tasks={','.join(TASKS)}", f"include={folders / 'tasks'}", f"out={out}"]
    assert main([*map(str, command), "log_samples=true", *words]) == 0
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def theirs(folders):
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    settings = {"pretrained": str(folders / "src"), "dtype": "float32", "device": "cpu"}
    manager = TaskManager(include_path=str(folders / "tasks"), include_defaults=False)
    return evaluator.simple_evaluate("hf", settings, list(TASKS), batch_size=1, task_manager=manager)


def compare(found, expected, atol) -> None:
    found, expected = responses(found["samples"]), responses(expected["samples"])
    assert found.keys() == expected.keys()
    assert len(found) == len(TASKS) * len(QUESTIONS)
    for key, answers in expected.items():
        for answer, other in zip(
            np.ravel(np.array(found[key], object)), np.ravel(np.array(answers, object)), strict=True
        ):
            if isinstance(other, float):
                assert float(answer) == pytest.approx(other, abs=atol), key
            else:
                assert str(answer) == str(other), key


def test_all_answers_are_those_of_hf(folders, theirs):
    found = ours(folders)
    compare(found, theirs, atol=1e-4)
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)


def test_batch_size_changes_no_answer(folders):
    compare(ours(folders, "batch=1"), ours(folders, "batch=5"), atol=1e-5)


def test_limit_takes_fewer_examples(folders):
    found = ours(folders, "limit=2", "num_fewshot=0")
    assert len(found["samples"]["choose"]) == 2


def test_an_unknown_task_is_rejected(folders, capsys):
    assert main(["harness", str(folders / "run"), "tasks=nowhere_at_all", f"include={folders / 'tasks'}"]) == 2
    assert "neither the harness nor you have such a task" in capsys.readouterr().err


@pytest.mark.parametrize("name", lm_eval_kinds.KINDS)
def test_recorded_answers_are_those_of_the_installed_hf(name, tmp_path):
    kind = lm_eval_kinds.KINDS[name]
    lm_eval_kinds.make_folder(kind, tmp_path / "hf")
    found = lm_eval_kinds.ask_hf(kind, tmp_path / "hf")
    assert count_differences(found, json.loads(lm_eval_kinds.GOLDENS.read_text())[name]) == 0
