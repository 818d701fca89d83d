"""`epochs=`: steps that follow from the rows of the data, and data whose rows cannot be counted."""

import collections

import pytest

from shardformer import OwnBatches, load_corpus
from shardformer.data.epochs import count_rows, count_steps
from shardformer.errors import UsageError
from tests import shared
from tests.data.chat.chats import write_lines

PAIRS, BATCH = 30, 5


@pytest.fixture
def pairs(tmp_path):
    records = [{"prompt": f"q{n}: ", "chosen": "yes", "rejected": "no"} for n in range(PAIRS)]
    return str(write_lines(tmp_path / "pairs.jsonl", records))


def configure(data: str, **keys):
    keys = {"data": data, "tokenizer": "bytes", "vocab": 0, "mesh": "1x1", "batch": BATCH, "epochs": 2.0} | keys
    return shared.tiny(**keys)


def read_rows(config, corpus, steps: int) -> collections.Counter:
    """Returns how many times each row is in the batches of these steps."""
    batches = corpus.train_batches(config)
    rows = [row.tobytes() for _ in range(steps) for row in next(batches)["tokens"]]
    batches.close()
    return collections.Counter(rows)


@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_each_pair_is_read_as_often_as_epochs_say(pairs, objective):
    config = configure(pairs, objective=objective, batch=1)
    corpus = load_corpus(config)
    counted = count_steps(config, corpus)
    assert counted.training.epochs == 2
    read = read_rows(config, corpus, counted.training.steps)
    assert len(read) == len(corpus.splits("train")[0].ends) // 2
    assert set(read.values()) == {2}


def test_a_step_fewer_reads_a_pair_less_often(pairs):
    config = configure(pairs, objective="dpo", batch=1)
    corpus = load_corpus(config)
    read = read_rows(config, corpus, count_steps(config, corpus).training.steps - 1)
    assert sorted(read.values())[:2] == [1, 2]


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (0.1, 1), (2.0, 5), (0.01, 1), (3.2, 8)])
def test_last_batch_counts_as_a_step(tmp_path, epochs, steps, said):
    """The file has 12 rows of 16 targets, and a batch 5 of them."""
    (tmp_path / "text.txt").write_text("a b c d " * 27)  # a tenth of it is held out
    config = configure(f"{tmp_path}/text.txt", epochs=epochs)
    corpus = load_corpus(config)
    assert count_rows(config, corpus) == 12
    assert count_steps(config, corpus).training.steps == steps
    assert f"epochs={epochs:g} of 12 rows in batches of 5: steps={steps}" in said


def test_decimal_of_epochs_is_exact(tmp_path):
    """As a float, 0.1 is a little more than a tenth, and so are three batches of 30 rows."""
    (tmp_path / "text.txt").write_text("abcd" * 135)
    config = configure(f"{tmp_path}/text.txt", batch=1, epochs=0.1)
    corpus = load_corpus(config)
    assert count_rows(config, corpus) == 30
    assert count_steps(config, corpus).training.steps == 3


def test_a_prompt_is_read_for_each_batch_of_its_answers(tmp_path):
    records = [{"prompt": f"q{n}: ", "completion": "yes"} for n in range(PAIRS)]
    data = str(write_lines(tmp_path / "prompts.jsonl", records))
    keys = {"objective": "grpo", "group_size": 2, "answer_tokens": 4, "rollout_steps": 3, "documents": "padded"}
    config = configure(data, mask_prompt=True, batch=6, epochs=1.0, **keys)
    corpus = load_corpus(config)
    rows = count_rows(config, corpus)
    assert count_steps(config, corpus).training.steps == 3 * -(-rows // 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"order": "random"}, "epochs=2 counts rows, which order=random draws without end; give steps="),
        ({"data": "{0}/a.txt,{0}/b.txt=2"}, "epochs=2 counts the rows of one source, and .* mixes 2 by their weights"),
    ],
)
def test_rows_without_an_end_are_rejected(tmp_path, keys, message):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a b c d " * 60)
    config = configure(**{"data": "{0}/a.txt"} | keys)
    config = config.replace(data=config.data.source.format(tmp_path))
    with pytest.raises(UsageError, match=message):
        count_steps(config, load_corpus(config))


def test_batches_of_a_program_are_rejected():
    config = configure("own")
    with pytest.raises(UsageError, match="epochs=2 counts rows, and own batches has no end; give steps="):
        count_steps(config, OwnBatches(lambda first: iter(()), vocab=61))


def test_keys_that_name_a_step_are_checked_when_it_is_counted(pairs):
    config = configure(pairs, objective="dpo", profile="100:200", epochs=1.0, steps=300)
    with pytest.raises(UsageError, match="profile=100:200 begins after the last step, steps=5"):
        count_steps(config, load_corpus(config))


def test_trainer_of_counted_steps_starts():
    """`memory RUN`, `verify RUN` and a program of one's own make one, without the data."""
    assert int(shared.trainer(epochs=3.0).init().step) == 0
