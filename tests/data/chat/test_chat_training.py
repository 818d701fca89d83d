"""A run on conversations, from a file to a resumed run; packed rows give the losses of single rows."""

import jax
import numpy as np
import pytest

from shardformer import load_corpus
from shardformer.__main__ import main
from shardformer.data.corpus import choose_row_layout
from shardformer.data.token_folder import TokenFolder
from shardformer.errors import RunError
from tests import runs, shared
from tests.data.chat.chats import records, write_lines

WORDS = ["tiny", "mesh=2x1", "tokenizer=bytes", "chat_template=plain", "seq=64", "steps=4",
         "eval_every=4"]  # fmt: skip


@pytest.fixture
def chat(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    return write_lines(tmp_path / "chat.jsonl", records())


@pytest.mark.slow
def test_a_run_on_conversations_stops_and_resumes(chat, tmp_path, capsys):
    words = [*WORDS, f"data={chat}"]
    assert runs.train(*words, f"out={tmp_path}/run", stop_after=2) == 0
    assert "of their positions hold tokens" in capsys.readouterr().out
    assert runs.train("--resume", f"{tmp_path}/run") == 0
    assert runs.rows(tmp_path / "run")[-1]["step"] == "4"


@pytest.mark.slow
def test_prepared_conversations_are_the_same_data(chat, tmp_path):
    prepare = ["data", "prepare", str(chat), f"out={tmp_path}/tokens", "tokenizer=bytes", "chat_template=plain"]
    assert main(prepare) == 0
    config = shared.tiny(seq=128, documents="masked", vocab=257, tokenizer="bytes")
    found = [
        load_corpus(config.replace(data=str(chat), chat_template="plain")),
        load_corpus(config.replace(data=f"{tmp_path}/tokens", tokenizer="auto")),
    ]
    assert found[0].fingerprint == found[1].fingerprint
    assert found[1].vocabulary.chat.name == "plain"
    mask = next((tmp_path / "tokens").glob("*.train.mask"))
    mask.write_bytes(bytes(len(mask.read_bytes())))
    with pytest.raises(RunError, match=r"train.mask is damaged"):
        TokenFolder.open(tmp_path / "tokens").check_contents()


def make_windows(split, config):
    return split.make_windows(choose_row_layout(config))


@pytest.mark.slow
def test_packed_rows_give_the_loss_and_gradients_of_single_ones(chat):
    settings = {"seq": 128, "vocab": 257, "mesh": "1x1", "batch": 64, "tokenizer": "bytes", "documents": "masked"}
    config = shared.tiny(**settings)
    corpus = load_corpus(config.replace(data=str(chat), chat_template="plain"))
    [split] = corpus.splits("train")
    packed, single = (make_windows(split, config.replace(documents=each)) for each in ("masked", "padded"))
    assert packed.count < single.count <= 64
    run, state = shared.update_and_grads(**settings), shared.initial_state(**settings)
    found = [run(state, windows.gather(np.arange(64)), 0)[1:] for windows in (packed, single)]
    assert_same(*found)
    without_mask = packed.gather(np.arange(64))
    without_mask["documents"] = np.zeros_like(without_mask["documents"])
    with pytest.raises(AssertionError):
        assert_same(run(state, without_mask, 0)[1:], found[1])


def assert_same(first, second) -> None:
    """Asserts that losses and gradients differ by at most 1e-6."""
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
