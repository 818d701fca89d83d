"""A run that learns from the rewards of another run: its numbers, its errors and its resume."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shardformer import checkpoint, exact, load_corpus
from shardformer.__main__ import main
from shardformer.config import Config
from shardformer.data.chat import preferences
from shardformer.data.chat.preference_windows import PreferenceSplit
from shardformer.data.prompt_windows import PromptRow
from shardformer.data.tokens import Tokens
from shardformer.data.windows import RowLayout
from shardformer.errors import RunError, UsageError
from shardformer.inference.chat_codec import ChatCodec, parse_prompt
from shardformer.inference.generator import Continuation
from shardformer.layout import mesh
from shardformer.objectives.reward_run import RewardOfRun, check_positions, check_tokens, fit_rows
from shardformer.objectives.rollouts import RewardOfText, RolloutsOfRun
from shardformer.training.run_folder import Run
from tests import runs, shared
from tests.convert.hf_models import FOLDER
from tests.data.chat.chatml_bytes import make_vocabulary
from tests.data.chat.chats import CHATML, PLAIN, write_lines
from tests.objectives.test_reward_model import read_scores
from tests.surroundings import let_fail

NEW = ["tiny", "tokenizer=chars", "seq=8", "layers=1", "lr=0.01"]
KEYS = ["batch=16", "eval_batches=1", "eval_every=12", "log_every=1"]
POLICY = [*NEW, *KEYS, "mesh=2x1", "objective=grpo", "group_size=4", "answer_tokens=1", "beta=0", "steps=12"]


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    """Returns the folder of a run that prefers even digits, beside prompts for a policy."""
    folder = tmp_path_factory.mktemp("rewards")
    pairs = [
        {"prompt": f"{n % 10} {n // 10 % 10} ", "chosen": str(2 * (n % 5)), "rejected": str(2 * (n % 5) + 1)}
        for n in range(200)
    ]
    tasks = [{"prompt": f"{n % 10} {n // 10} ", "completion": str(n % 10)} for n in range(100)]
    write_lines(folder / "tasks.jsonl", tasks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFORMER_CACHE", str(folder / "cache"))
        data = write_lines(folder / "pairs.jsonl", pairs)
        words = [*NEW, *KEYS, "mesh=1x1", "objective=reward", "steps=12", f"data={data}", f"out={folder}/rewards"]
        assert runs.train(*words) == 0
        yield folder / "rewards"


def make_policy(**keys) -> Config:
    keys = {"objective": "grpo", "group_size": 2, "batch": 4, "answer_tokens": 2, "seq": 8, "mesh": "1x1"} | keys
    return shared.tiny(**keys)


def test_pairs_are_put_in_order(rewards):
    rows = runs.rows(rewards)
    assert float(rows[-1]["accuracy"]) == 1
    assert float(rows[-1]["reward_margin"]) > 1
    assert {row["z_loss"] for row in rows} == {""}


def test_reward_is_the_number_of_the_last_token(rewards):
    """The answers are more than a batch, and have different lengths."""
    run, config = Run.open(rewards), make_policy(zero=3, mesh="2x2")
    source = RewardOfRun(str(rewards))
    source.open(SimpleNamespace(config=config), SimpleNamespace(model=SimpleNamespace(mesh=mesh.make(config))))
    prompts, answers = [[1, 2], [3], [2, 4, 6], [1], [5, 7]], [[1], [2, 3], [4], [5, 6], [7]]
    got = source.compute([PromptRow(ids, []) for ids in prompts], [Continuation(ids, [], True) for ids in answers])
    _, params = run.restore_params(shared._trainer(run.config).model)
    for prompt, answer, reward in zip(prompts, answers, got, strict=True):
        tokens = np.array([prompt + answer])
        expected = exact.run(lambda p, ids=tokens: read_scores(run.config, p, ids)[0, -1], shared.on_host(params))
        assert reward == pytest.approx(float(expected.outputs), rel=1e-5)


def test_training_reads_the_token_that_a_policy_ends_with(tmp_path, monkeypatch):
    """ChatML has a line feed behind <|im_end|>, with which a sampled answer ends."""
    vocabulary = make_vocabulary()
    question = [{"role": "user", "content": "a?"}]
    record = {"prompt": question} | {
        side: [{"role": "assistant", "content": text}] for side, text in {"chosen": "b", "rejected": "no"}.items()
    }
    path = write_lines(tmp_path / "pairs.jsonl", [record])
    [pair] = preferences.read_pairs(path, CHATML, letters=vocabulary.letters)
    sides = [preferences.encode_side(vocabulary, side, "a test") for side in pair]
    ids, learned = (np.concatenate(parts) for parts in zip(*sides, strict=True))
    ends = np.cumsum([len(side[0]) for side in sides])
    split = PreferenceSplit(Tokens([ids], "TEST"), ends, Tokens([learned], "TEST"))
    batch = split.make_windows(RowLayout(99, marks_last=True)).gather(np.arange(1))

    codec = ChatCodec(vocabulary, CHATML)
    prompt = codec.encode_all([parse_prompt("a?")])[0]
    answers = [vocabulary.encode_with_offsets(f"{text}<|im_end|>")[0].tolist() for text in ("b", "no")]
    assert all(codec.make_stops()(answer) for answer in answers)
    source, read = object.__new__(RewardOfRun), []
    source._config = shared.tiny(seq=99, batch=2, mesh="1x1")

    def note(tokens, scored):
        read.extend(zip(tokens, scored, strict=True))
        return np.zeros(len(tokens))

    monkeypatch.setattr(source, "_compute_part", note, raising=False)
    source.compute([PromptRow(prompt, [])] * 2, [Continuation(ids, [], True) for ids in answers])
    for side, (tokens, scored) in enumerate(read):
        assert batch["scored"][0, side].tolist() == scored.tolist()
        assert np.flatnonzero(scored).tolist() == [len(prompt) + len(answers[side]) - 1]
        for row in (tokens, batch["tokens"][0, side]):
            assert row[: scored.argmax() + 1].tolist() == [*prompt, *answers[side]]


def change_config(rewards, tmp_path, **keys):
    """Returns the folder of a copy of the run, whose configuration has other keys."""
    shutil.copytree(rewards, tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return tmp_path / "copy"


def remove_steps(rewards, tmp_path):
    folder = change_config(rewards, tmp_path)
    for step in folder.glob("step_*"):
        shutil.rmtree(step)
    return folder


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (
            lambda run, path: FOLDER / "gpt2",
            "gpt2 is in Hugging Face's format, expected a run; convert a classifier with",
        ),
        (lambda run, path: change_config(run, path, objective="dpo"), "was trained with objective=dpo, expected"),
        (lambda run, path: run / "step_00000012", "is a checkpoint; name its run"),
        (remove_steps, "copy has no checkpoint yet"),
        (lambda run, path: run / "nowhere", "or the folder of a run with objective=reward; got reward="),
    ],
    ids=["hugging_face", "another_objective", "checkpoint", "no_checkpoint", "no_folder"],
)
def test_folder_without_rewards_is_rejected(rewards, tmp_path, find, message):
    with pytest.raises(UsageError, match=message):
        RolloutsOfRun(make_policy(reward=str(find(rewards, tmp_path))))


def test_other_tokens_are_rejected_before_any_device(rewards, tmp_path, monkeypatch, capsys):
    for module, name in ((mesh, "start"), (jax, "process_index"), (jax, "process_count")):
        let_fail(monkeypatch, module, name, AssertionError("it has started the devices"))
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path))
    data = write_lines(tmp_path / "letters.jsonl", [{"prompt": f"{n} ", "completion": "c"} for n in range(99)])
    assert runs.train(*POLICY, f"data={data}", f"reward={rewards}", f"out={tmp_path}/run") == runs.USAGE
    assert "it reads other tokens; give a reward model with this tokenizer" in capsys.readouterr().err


def test_other_options_of_the_tokenizer_are_rejected():
    plain, chatml = make_vocabulary(), make_vocabulary().with_chat(CHATML)
    check_tokens("R", chatml, chatml.with_chat(dataclasses.replace(CHATML, date="1999-01-01")))
    for reward, policy, message in (
        (plain, plain.with_special_tokens(),
         "reward=R has special_tokens=false bos=false, and this run special_tokens=true bos=false: it reads other"),
        (plain.with_beginning("true", 256), plain, "has special_tokens=false bos=true, and this run special_tok"),
        (plain, chatml, r"has no chat_template, and this run chat_template=chatml \(........\): it reads other tokens"),
        (chatml, plain.with_chat(PLAIN), r"has chat_template=chatml \(........\), and this run chat_template=plain \("),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            check_tokens("R", reward, policy)


def test_mesh_that_does_not_divide_the_rewards_is_rejected(rewards):
    policy = make_policy(mesh="1x16", heads=16, reward=str(rewards))
    run = SimpleNamespace(config=policy, vocabulary=Run.open(rewards).vocabulary)
    with pytest.raises(UsageError) as caught:
        RewardOfRun(str(rewards)).check(run, None)
    assert str(caught.value) == (
        f"reward={rewards} cannot be split over this policy's mesh: heads=8 does not divide over mp=16 (mesh=1x16); "
        "try mesh=1x8"
    )


def test_evaluation_checks_the_rewards_on_its_own_mesh(rewards, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path))
    keys = {"data": str(rewards.parent / "tasks.jsonl"), "tokenizer": "chars", "vocab": 0, "out": str(tmp_path / "run")}
    config = make_policy(mesh="2x2", **keys)
    Run.create(config, load_corpus(config)).write_documents()
    meshes = []
    monkeypatch.setattr(RewardOfRun, "check", lambda self, run, corpus: meshes.append(run.config.parallel.mesh))
    assert main(["eval", str(tmp_path / "run"), "mesh=1x1", f"reward={rewards}"]) == runs.USAGE  # no checkpoint
    assert meshes == ["1x1"]


def test_chunks_of_the_policy_are_not_those_of_its_rewards():
    """A reward model has no logits, and rejects loss_chunk."""
    assert fit_rows(shared.tiny(objective="reward"), make_policy(loss_chunk=64)).parallel.loss_chunk is None


def test_error_names_the_rewards_as_they_were_given():
    with pytest.raises(UsageError, match="reward=folder cannot be split over this policy's mesh"):
        fit_rows(
            shared.tiny(objective="reward", heads=4, mesh="1x1"), make_policy(reward="folder", mesh="1x8", heads=8)
        )


def test_short_table_of_positions_is_rejected():
    """A row of the policy has a prompt and an answer of up to seq + 1 tokens."""
    reward = shared.tiny(objective="reward", positions="learned", seq=8)
    check_positions(reward, make_policy(seq=7, mesh="auto"))
    assert fit_rows(reward, make_policy(seq=7)).model.seq == 8
    with pytest.raises(UsageError, match="have up to 9 tokens; give seq=7"):
        check_positions(reward, make_policy(seq=8, mesh="auto"))


@pytest.mark.parametrize(("trained", "seq", "width"), [(150, 128, 256), (250, 127, 128)])
def test_other_frequencies_of_longrope_are_rejected(trained, seq, width):
    """They are chosen by the width of a row, padding included."""
    short, long = 127, 128  # seq of policies whose rows are on either side of 200 tokens
    reward = shared.tiny(objective="reward", rotary_scaling="longrope:200,1,1,1", head_dim=2, seq=trained, mesh="1x1")
    assert fit_rows(reward, make_policy(seq=short if seq == long else long)).model.seq in (128, 256)
    with pytest.raises(UsageError, match=f"seq={trained}, and would read rows of {width} tokens here: its longrope"):
        fit_rows(reward, make_policy(seq=seq))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sample", "{run}"], "this run trained a reward model: it has no language model, which is needed here"),
        (["convert", "{run}", "{out}.gguf"], "takes language models only; give format=hf or weights="),
        (["train", "base={run}", "data={data}", "out={out}"], "trained a reward model, which is no language model"),
        (["train", *NEW, "mesh=1x1", "data={data}", "objective=distill", "teacher={run}", "out={out}"],
         "trained a reward model, which gives no distribution over tokens"),
    ],
    ids=["sample", "convert", "base", "teacher"],
)  # fmt: skip
def test_command_that_needs_a_vocabulary_rejects_a_reward_model(rewards, tmp_path, capsys, command, message):
    data = rewards.parent / "tasks.jsonl"
    assert main([word.format(run=rewards, out=tmp_path / "out", data=data) for word in command]) == runs.USAGE
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def policy(rewards):
    """Returns the folder of a run that was stopped after 6 of 12 steps, and resumed."""
    out = rewards.with_name("policy")
    words = [*POLICY, f"data={rewards.parent}/tasks.jsonl", f"reward={rewards}", f"out={out}"]
    assert runs.train(*words, stop_after=6) == 0
    assert runs.train("--resume", str(out), f"reward={rewards}") == 0
    return out


@pytest.mark.nightly
def test_policy_learns_from_the_rewards(policy):
    rows = [float(row["reward"]) for row in runs.rows(policy)]
    assert len(rows) == 12
    assert np.mean(rows[-3:]) > np.mean(rows[:3]) + 1


@pytest.mark.nightly
def test_resume_with_rewards_is_bitwise(policy, rewards):
    through = policy.with_name("through")
    assert runs.train(*POLICY, f"data={rewards.parent}/tasks.jsonl", f"reward={rewards}", f"out={through}") == 0
    assert [row["loss"] for row in runs.rows(policy)] == [row["loss"] for row in runs.rows(through)]
    arrays = [(checkpoint.step_folder(folder, 12) / "arrays.npy").read_bytes() for folder in (policy, through)]
    assert arrays[0] == arrays[1]


@pytest.mark.nightly
def test_changed_rewards_are_rejected(policy, rewards, tmp_path, capsys):
    """A copy that has been trained further."""
    other = tmp_path / "other"
    shutil.copytree(rewards, other)
    assert runs.train("--resume", str(other), "steps=14") == 0
    assert runs.train("--resume", str(policy), "steps=13", f"reward={other}") == runs.FAILED
    stored = json.loads((policy / "reward.json").read_text())["weights"]
    message = f"reward={other} has changed: the run started with weights of sha256 {stored[:12]}, and its best are "
    assert message in capsys.readouterr().err


def test_function_in_place_of_a_reward_model_is_rejected(tmp_path):
    run, source = SimpleNamespace(records=tmp_path), RewardOfText("match", "grpo")
    source.check_unchanged(run)
    (tmp_path / "reward.json").write_text("{}")
    with pytest.raises(RunError, match="reward=match is no run, and this run has learned from the rewards of one"):
        source.check_unchanged(run)


@pytest.mark.nightly
def test_rewards_start_from_a_base(policy, rewards):
    """The head of a language model is left out, and that of a reward model is read."""
    folder, keys = rewards.parent, [*KEYS, "mesh=2x1", "steps=1"]
    for base in (policy, rewards):
        out, given = folder / f"from_{base.name}", [*keys, f"data={folder}/pairs.jsonl", "objective=reward"]
        assert runs.train(f"base={base}", *given, "lr=1e-12", "lr_min=0", "warmup=0", f"out={out}") == 0
        got, expected = (read_params(each) for each in (out, base))
        assert set(expected) - set(got) == ({"transformer/head"} if base != rewards else set())
        for module in got.keys() & expected.keys():
            for name, leaf in expected[module].items():
                np.testing.assert_allclose(got[module][name], leaf, atol=1e-9)


def read_params(folder) -> dict:
    run = Run.open(folder)
    return shared.on_host(run.restore_params(shared._trainer(run.config).model)[1])
