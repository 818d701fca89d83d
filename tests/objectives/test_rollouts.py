"""Runs on answers that the model samples: the ratio is 1, a resume inside a rollout is bitwise, and rewards rise."""

import csv
import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.analysis import verify_exact
from shardformer.data.prompt_windows import PromptRow
from shardformer.errors import RunError, UsageError
from shardformer.inference.generator import Continuation, never_stop
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.objectives import rollouts
from tests import meshes, runs, shared
from tests.data.chat.chats import write_lines
from tests.surroundings import let_fail

KEYS = ["tiny", "mesh=2x1", "zero=3", "accum=2", "tokenizer=chars", "seq=8", "objective=grpo", "answer_tokens=3",
        "batch=32", "group_size=4", "rollout_steps=2", "steps=24", "eval_every=24", "eval_batches=1", "log_every=1",
        "lr=0.01", "save_every=23", "beta=0.1"]  # fmt: skip
REWARD = "def score(prompt, answer, expected):\n    return answer[0] in '02468'\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a run of 24 steps."""
    folder = tmp_path_factory.mktemp("rollouts")
    records = [{"prompt": f"{n % 10} {n // 10} ", "completion": f"{max(n % 10, n // 10)}"} for n in range(100)]
    words = [*KEYS, f"data={write_lines(folder / 'digits.jsonl', records)}", f"reward={folder}/score.py:score"]
    (folder / "score.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFORMER_CACHE", str(folder / "cache"))
        assert runs.train(*words, f"out={folder}/through") == 0
        yield folder


@pytest.fixture(scope="module")
def resumed(finished):
    """Returns that folder with a copy of the run, which resumes at step 23, inside its last rollout."""
    shutil.copytree(finished / "through", finished / "stopped")
    shutil.rmtree(checkpoint.step_folder(finished / "stopped", 24))
    assert runs.train("--resume", f"{finished}/stopped", f"reward={finished}/score.py:score") == 0
    return finished


def read_column(folder, name: str) -> list[float]:
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


@pytest.mark.nightly
def test_resume_inside_a_rollout_is_bitwise(resumed):
    through, stopped = (runs.rows(resumed / name) for name in ("through", "stopped"))
    assert [row["loss"] for row in through] == [row["loss"] for row in stopped]
    arrays = [
        (checkpoint.step_folder(resumed / name, 24) / "arrays.npy").read_bytes() for name in ("through", "stopped")
    ]
    assert arrays[0] == arrays[1]


def test_sampler_agrees_with_the_step(finished):
    """The first step of a rollout has the sampler's weights. The second has not, unlike one of a rollout made again."""
    gaps, clipped = (read_column(finished / "through", name) for name in ("logp_gap", "clip_share"))
    assert max(gaps[::2]) < 1e-6
    assert gaps[1] > 1e-3
    assert clipped[0] == 0
    assert max(clipped[1::2]) > 0


def test_digit_task_reaches_its_reward(finished):
    """Answers that start with an even digit; the full task is scripts/reward_task.py."""
    found = read_column(finished / "through", "reward")
    assert found[0] < 0.7
    assert np.mean(found[-4:]) > 0.85


def test_reference_is_the_start(finished):
    kl = read_column(finished / "through", "kl")
    assert abs(kl[0]) < 1e-6
    assert min(kl[1:]) > 1e-4


def test_resume_needs_the_reward(finished, capsys):
    """A stored run names no code."""
    assert "reward" not in json.loads((finished / "through" / "config.json").read_text())
    assert runs.train("--resume", f"{finished}/through", "steps=25") == runs.USAGE
    assert "objective=grpo learns from rewards, which each start names" in capsys.readouterr().err


def test_evaluation_is_the_mean_reward(finished, capsys):
    command = ["eval", f"{finished}/through", "split=validation", "reward=length:3", "mesh=1x1"]
    assert main(command) == 0
    assert "mean reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [(["reward=other", "data=nowhere"], "reward takes FILE.py:FUNCTION"),
     (["data=nowhere"], "objective=grpo learns from rewards"),
     (["reward={folder}/reward.py:word"], "called with the first record's own answer: reward gave 'much'")],
)  # fmt: skip
def test_evaluation_tries_the_reward_first(finished, tmp_path, monkeypatch, capsys, words, message):
    """Before the data are read, and what needs a record before a device starts."""
    (tmp_path / "reward.py").write_text("def word(prompt, answer, expected):\n    return 'much'\n")
    monkeypatch.setattr(mesh, "start", lambda *_, **__: pytest.fail("a device started"))
    words = [word.format(folder=tmp_path) for word in words]
    assert main(["eval", f"{finished}/through", "split=validation", *words]) == runs.USAGE
    assert message in capsys.readouterr().err


def test_rewards_that_are_built_in():
    assert rollouts.open_reward("match")("1+1=", " 2\n", "2") == 1
    assert rollouts.open_reward("match")("1+1=", "22", "2") == 0
    assert [rollouts.open_reward("length:4")("", "x" * n, "") for n in (0, 2, 4, 5, 9)] == [0, 0.5, 1, 0.75, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "match, length:N or the folder of a run with objective=reward; got reward=other"),
        ("length:x", "reward=length:N takes a number of characters of at least 1, got 'x'"),
        ("no.py:score", "reward=no.py:score: no.py is not a file"),
        ("{}/bad.py:score", "bad.py:score cannot be imported: division by zero"),
        ("{}/one.py:other", "cannot be imported: module 'one' has no attribute 'other'"),
        ("{}/one.py:one", "one.py:one is a int; name a function"),
        ("{}/two.py:score", "two.py:score has the parameters (prompt, answer), and is called with three texts; write"),
        ("{}/ends.py:score", "ends.py:score cannot be imported: the file calls sys.exit"),
    ],
)
def test_wrong_reward_is_rejected(tmp_path, name, message):
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "one.py").write_text("one = 1")
    (tmp_path / "two.py").write_text("def score(prompt, answer): return 1")
    (tmp_path / "ends.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(UsageError, match=re.escape(message)):
        rollouts.open_reward(name.format(tmp_path))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda *_: np.nan, "reward gave nan for the answer 'b'; expected a finite number"),
        (lambda *_: None, "reward gave None for the answer 'b'; expected a finite number"),
    ],
)
def test_reward_without_a_number_ends_the_run(reward, message):
    with pytest.raises(RunError, match=message):
        rollouts.compute_reward(reward, "a", "b", "c")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("None", "called with the first record's own answer: reward gave None for the answer '"),
        ("int(answer) / 0", "own answer: reward failed for the answer '4': ZeroDivisionError: division by zero"),
    ],
)
def test_reward_is_tried_before_any_device(tmp_path, monkeypatch, capsys, result, message):
    let_fail(monkeypatch, mesh, "start", AssertionError("it has started the devices"))
    (tmp_path / "score.py").write_text(f"def score(prompt, answer, expected): return {result}")
    records = [{"prompt": f"{n:02} ", "completion": "4"} for n in range(100)]
    words = [*KEYS, f"data={write_lines(tmp_path / 'digits.jsonl', records)}", f"reward={tmp_path}/score.py:score"]
    assert runs.train(*words, f"out={tmp_path}/run") == runs.USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_reward_that_calls_exit_is_named(tmp_path):
    (tmp_path / "ends.py").write_text("def score(*_): raise SystemExit(0)")
    reward = rollouts.open_reward(f"{tmp_path}/ends.py:score")
    with pytest.raises(RunError, match=r"reward=.*/ends\.py:score calls sys\.exit\(0\); raise an exception"):
        rollouts.compute_reward(reward, "a", "b", "c")


def test_interrupt_of_a_reward_stays_an_interrupt(tmp_path):
    (tmp_path / "waits.py").write_text("def score(*_): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        rollouts.compute_reward(rollouts.open_reward(f"{tmp_path}/waits.py:score"), "a", "b", "c")


class _Away:
    """A reference whose log-probabilities are above those of the sampler, by 1 at each token."""

    def measure(self, params, tokens, targets):
        return jnp.where(targets > 0, -1.0, 0.0) + 1.0


class _OneAndZero(rollouts.RewardOfText):
    """A reward of 1 for the first of two answers."""

    def __init__(self):
        super().__init__("match", "grpo")

    def compute(self, rows, answers):
        return np.array([1.0, 0.0])


def test_rewards_of_rloo_lose_the_divergence(monkeypatch):
    config = shared.tiny(mesh="1x1", objective="rloo", group_size=2, answer_tokens=8, batch=2, beta=0.5)
    run = SimpleNamespace(config=config, vocabulary=[0] * 16, special_tokens=None)
    monkeypatch.setattr(rollouts.Answers, "of", lambda run: None)
    made = rollouts.Rollouts(run, Model.on(config, mesh.make(config)), _Away(), _OneAndZero())
    answers = [Continuation([5, 6, 7], [-1.0] * 3, True), Continuation([9], [-1.0], True)]
    monkeypatch.setattr(made, "_sample", lambda *_: answers)
    monkeypatch.setattr(rollouts, "read_prompts", lambda batch: [PromptRow([1, 2], [])])
    arrays = made.make({}, {}, 0)
    # The divergence is minus the number of tokens: the rewards are 1 + 0.5 * 3 and 0 + 0.5 * 1.
    np.testing.assert_allclose(np.asarray(arrays["advantages"])[:, 0], [2.0, -2.0], rtol=1e-6)


def test_answers_are_drawn_among_the_likely_tokens(monkeypatch):
    """Their log-probabilities are those of all tokens. The dense reference computes both from full passes."""
    config = shared.tiny(mesh="1x1", objective="grpo", group_size=2, answer_tokens=8, batch=2, beta=0.0)
    params, model = verify_exact.draw_parameters(config), Model.on(config, mesh.make(config))
    run = SimpleNamespace(config=config, vocabulary=range(shared.VOCAB), special_tokens=None)
    monkeypatch.setattr(rollouts.Answers, "of", lambda run: SimpleNamespace(stops=never_stop))
    made, placed = rollouts.Rollouts(run, model, None, _OneAndZero()), jax.device_put(params, model.shardings)
    monkeypatch.setattr(rollouts, "read_prompts", lambda batch: [PromptRow([1, 2], [])])

    def draw(**keys):
        """Returns the highest rank of a drawn token, and the largest probability of all likelier ones."""
        made._config = config.replace(**keys)  # the generator is compiled once
        arrays = jax.device_get(made.make(placed, {}, 0))
        logits_BTV, is_answer = meshes.compute_logits(config, params, arrays["tokens"]), arrays["weights"] > 0
        p = np.exp(logits_BTV[is_answer])
        p /= p.sum(1, keepdims=True)
        drawn = np.take_along_axis(p, arrays["targets"][is_answer][:, None], 1)
        assert len(drawn) == 2 * 8
        np.testing.assert_allclose(arrays["sampled"][is_answer], np.log(drawn[:, 0]), atol=1e-4)
        likelier = p > drawn * (1 + 1e-4)
        return likelier.sum(1).max(), (p * likelier).sum(1).max()

    rank, share = draw()
    assert rank >= 5
    assert share >= 0.3
    assert draw(rollout_top_k=5)[0] < 5
    assert draw(rollout_top_p=0.3)[1] < 0.3


def test_group_without_a_difference_has_no_advantage():
    assert not rollouts.compute_advantages(np.array([1.0, 1, 1, 1]), 4, "grpo").any()


@pytest.mark.parametrize(("token_mean", "expected"), [("answer", [1 / 3, 1]), ("batch", [1, 1])])
def test_answers_weigh_the_same_with_token_mean_answer(token_mean, expected):
    """Each token of an answer of n tokens has 1 / n of it, however long answers may be."""
    config = shared.tiny(objective="grpo", group_size=2, answer_tokens=8, token_mean=token_mean)
    answers = [Continuation([5, 6, 7], [-1.0, -2.0, -3.0], True), Continuation([9], [-4.0], True)]
    rows = [PromptRow([1, 2], []), PromptRow([3, 4], [])]
    arrays = rollouts.Rollouts._lay_out(SimpleNamespace(_config=config), rows, answers, np.array([1.0, 0.0]))
    assert [sorted(set(row[row > 0].tolist())) for row in arrays["weights"]] == [[np.float32(x)] for x in expected]
    assert [(row > 0).sum() for row in arrays["weights"]] == [3, 1]
    assert arrays["targets"][0][arrays["weights"][0] > 0].tolist() == [5, 6, 7]
    assert arrays["sampled"][0][arrays["weights"][0] > 0].tolist() == [-1, -2, -3]
    assert arrays["lengths"].tolist() == [3, 1]
