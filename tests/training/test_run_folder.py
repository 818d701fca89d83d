"""The run folder: its documents, its checkpoints, and the folders that are rejected."""

import dataclasses
import os
import re
import shutil

import jax
import numpy as np
import pytest

from shardformer import OwnBatches, checkpoint
from shardformer.config import Config
from shardformer.data import Characters, Corpus, load_vocabulary
from shardformer.data.source import Texts
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.training.checkpoint_progress import Best
from shardformer.training.run_folder import Run
from tests import asserts, runs, shared
from tests.surroundings import note_texts

TEXTS = ("abcdefgh" * 20, "abc", "abd")


def make_corpus(name, *texts):
    vocabulary = Characters.from_text("".join(texts))
    return Corpus(name, vocabulary, (Texts(name, texts).open(vocabulary, lambda *_: None),))


CORPUS = make_corpus("somewhere.txt", *TEXTS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of steps 3 and 5, of which 3 is the best."""
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path_factory.mktemp("saved") / "run")), CORPUS)
    trainer = runs.trainer(run.config)
    run.write_documents()
    for step in (3, 5):
        state = trainer.init()
        checkpoint.save(run.out, step, state._replace(step=state.step + step), run.documents(step, Best(3, 1.5)))
    return run


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of it that may be damaged."""
    return Run.open(shutil.copytree(saved.out, tmp_path / "copy"))


def test_new_run_takes_vocabulary_and_source_from_the_corpus(tmp_path):
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path / "run")), CORPUS)
    assert (run.config.model.vocab, run.config.data.source, len(run.vocabulary)) == (8, "somewhere.txt", 8)
    assert not run.out.exists()  # a wrong command must leave nothing behind
    assert Run.create(shared.tiny(vocab=100), CORPUS).config.model.vocab == 100


def test_a_vocabulary_too_small_for_the_corpus(tmp_path):
    with pytest.raises(UsageError, match=r"vocab=5 is less than the 8 characters of somewhere\.txt; try vocab=8"):
        Run.create(shared.tiny(vocab=5), CORPUS)


def test_own_batches_of_another_vocabulary_are_rejected(tmp_path):
    own = OwnBatches(lambda first: iter(()), vocab=8)
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path / "run")), own)
    run.write_documents()
    run.check_corpus(own)
    with pytest.raises(UsageError, match=r"own batches has vocab=50, but .*run was trained with vocab=8; give"):
        run.check_corpus(OwnBatches(lambda first: iter(()), vocab=50))


def test_open_is_the_inverse_of_write(saved):
    assert Run.open(saved.out) == saved
    assert Run.open(saved.out, {"steps": 99}).config == saved.config.replace(steps=99)


def test_every_checkpoint_carries_the_documents(saved):
    for step in (3, 5):
        folder = checkpoint.step_folder(saved.out, step)
        assert checkpoint.read_config(folder) == saved.config
        assert load_vocabulary(folder) == (saved.vocabulary, saved.fingerprint)


def test_state_without_an_optimizer_gets_float32_masters(tmp_path):
    """A converted run has parameters only, which may be stored in bfloat16."""
    half = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    run = Run.create(shared.tiny(vocab=0, mesh="1x1", out=str(tmp_path / "run"), **half), CORPUS)
    trainer = runs.trainer(run.config)
    state = trainer.init()
    run.write_documents()
    checkpoint.save(run.out, 5, {"step": state.step + 5, "params": state.params}, run.documents(5, Best()))
    restored, _ = run.restore(trainer)
    assert restored.step == 5
    assert {leaf.dtype.name for leaf in jax.tree.leaves(restored.masters)} == {"float32"}
    asserts.assert_bitwise_equal(restored.params, state.params)


def test_a_checkpoint_in_place_of_its_run_is_told_apart(saved):
    with pytest.raises(UsageError, match=rf"step_00000003 is a checkpoint; name its run, {saved.out}"):
        Run.open(checkpoint.step_folder(saved.out, 3))


def test_a_moved_run_goes_on_where_it_lies(copied, saved):
    assert copied.out != saved.out
    assert copied.config == saved.config.replace(out=str(copied.out))


def test_out_cannot_change_on_resume(saved):
    with pytest.raises(UsageError, match=r"out cannot change on resume: copy .* and resume the copy"):
        Run.open(saved.out, {"out": "elsewhere"})
    assert Run.open(saved.out, {"out": str(saved.out)}) == saved


def test_restore_takes_the_newest_and_the_best_so_far(saved):
    state, best = saved.restore(runs.trainer(saved.config))
    assert (int(state.step), best) == (5, Best(3, 1.5))


def test_restore_without_a_checkpoint_starts_at_zero(tmp_path):
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path / "run")), CORPUS)
    state, best = run.restore(runs.trainer(run.config))
    assert (int(state.step), best) == (0, Best())


def test_parameters_of_the_best_of_a_step_and_of_none(saved):
    model = runs.trainer(saved.config).model
    assert saved.restore_params(model)[0] == 3
    step, params = saved.restore_params(model, step=5)
    assert step == 5
    np.testing.assert_array_equal(params["transformer/embed"]["tokens"], model.init(0)["transformer/embed"]["tokens"])
    with pytest.raises(UsageError, match="has no checkpoint of step 4; there are 3, 5"):
        saved.restore_params(model, step=4)


def test_parameters_on_another_mesh(saved):
    settings = saved.config.replace(mesh="1x8")
    _, params = saved.restore_params(Model.on(settings, mesh.make(settings)))
    q = params["transformer/layers"]["q"]
    assert q.addressable_shards[0].data.size * 8 == q.size


@pytest.mark.slow
def test_rounded_parameters_are_evaluated_averaged_and_a_base(tmp_path):
    layers, types = "transformer/layers", {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    run = Run.create(shared.tiny(vocab=0, ema=0.5, out=str(tmp_path / "run"), **types), CORPUS)
    trainer = runs.trainer(run.config)
    run.write_documents()
    state = trainer.init()
    checkpoint.save(run.out, 1, state._replace(step=state.step + 1), run.documents(1, Best(1, 1.5)))
    rounded = trainer.model.init(0)[layers]["q"].astype("bfloat16")
    for averaged in (False, True):
        _, params = run.restore_params(trainer.model, averaged=averaged)
        np.testing.assert_array_equal(params[layers]["q"], rounded)
    for kind in ("float32", "bfloat16"):
        heir = run.config.replace(base=str(run.out), param_dtype=kind, seed=1, out=str(tmp_path / kind))
        state, _ = Run.create(heir, CORPUS).restore(runs.trainer(heir.replace(vocab=8)))
        learned = (state.params if kind == "float32" else state.masters)[layers]["q"]
        assert learned.dtype == "float32"
        np.testing.assert_array_equal(learned, rounded.astype("float32"))


def test_a_run_without_a_checkpoint_has_no_parameters(copied):
    for step in (3, 5):
        shutil.rmtree(checkpoint.step_folder(copied.out, step))
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        copied.restore_params(runs.trainer(copied.config).model)


@pytest.mark.parametrize("left", ["config.json", "step_00000005"])
def test_a_folder_that_holds_a_run_is_not_overwritten(copied, left):
    for path in copied.out.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UsageError, match="already holds a run; go on with `train --resume"):
        copied.refuse_to_overwrite()


@pytest.mark.parametrize(
    ("keys", "named"),
    [({"optimizer": "my files.py:lion"}, " 'optimizer=my files.py:lion'"), ({"optimizer": "adamw"}, ""),
     ({"objective": "grpo", "batch": 8, "answer_tokens": 2, "reward": "rewards"}, " reward=rewards")],
)  # fmt: skip
def test_command_for_going_on_names_the_code_and_the_reward(copied, keys, named):
    config = copied.config.replace(**keys, out=str(copied.out))
    with pytest.raises(UsageError, match=re.escape(f"`train --resume {copied.out}{named}`")):
        dataclasses.replace(copied, config=config).refuse_to_overwrite()


@pytest.mark.parametrize(
    ("trained", "objective", "message"),
    [("task", "lm", "trained a task of yours, which is no language model; give another base$"),
     ("task", "reward", "trained a task of yours, which is no language model; give another base$"),
     ("reward", "lm", "trained a reward model, which is no language model; give another base, or objective=reward$")],
)  # fmt: skip
def test_base_without_the_parameters_of_a_run_is_rejected(tmp_path, trained, objective, message):
    config = Config.of(objective="task", vocab=1) if trained == "task" else shared.tiny(objective=trained)
    Run(config.replace(out=str(tmp_path)), CORPUS.vocabulary, CORPUS.fingerprint).write_documents()
    with pytest.raises(UsageError, match=message):
        Run.create(shared.tiny(vocab=0, base=str(tmp_path), objective=objective), CORPUS)


@pytest.fixture
def failed(tmp_path):
    """A run whose start failed in its first step, in a folder with a file of the user's."""
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path)), CORPUS)
    run.write_documents()
    (tmp_path / "metrics.csv").write_text("step,loss\n")
    for name in ("special_tokens.json", "notes.json"):
        (tmp_path / name).write_text("{}")
    return run


def test_a_start_that_failed_before_its_first_step_is_replaced(failed):
    failed.refuse_to_overwrite()
    assert (failed.out / "config.json").exists()  # until the folder is locked
    failed.claim_folder()
    assert {path.name for path in failed.out.iterdir()} == {"metrics.csv", "notes.json"}


@pytest.mark.parametrize("kept", ["row", "cut row", "step_00000001", "step_00000001.damaged", "references"])
def test_a_run_with_anything_to_keep_is_not_replaced(failed, kept):
    if kept.endswith("row"):
        (failed.out / "metrics.csv").write_text("step,loss\n1,2.5\n"[: -2 if kept == "cut row" else None])
    else:
        (failed.out / kept).mkdir()
    for start in (failed.refuse_to_overwrite, failed.claim_folder):
        with pytest.raises(UsageError, match="already holds a run"):
            start()
    assert (failed.out / "special_tokens.json").exists()


def test_a_folder_with_other_things_or_none_is_free(tmp_path):
    (tmp_path / "notes.txt").touch()
    for out in (tmp_path, tmp_path / "new"):
        Run.create(shared.tiny(out=str(out)), CORPUS).refuse_to_overwrite()
    with pytest.raises(UsageError, match="is a file; name a folder"):
        Run.create(shared.tiny(out=str(tmp_path / "notes.txt")), CORPUS).refuse_to_overwrite()


@pytest.mark.parametrize("name", ["arrays.npy", "tree.pkl", "manifest.json", "progress.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_newest_checkpoint_is_reported_and_left_aside(copied, name, damage, said):
    folder = checkpoint.step_folder(copied.out, 5)
    raw = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage != "gone":
        (folder / name).write_bytes(raw[:-20] if damage == "cut" else raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:])
    state, best = copied.restore(runs.trainer(copied.config))
    assert (int(state.step), best) == (3, Best(3, 1.5))
    (line,) = said
    assert str(folder) in line
    assert name in line
    assert "step_00000005.damaged, and the run goes on from step 3" in line
    assert checkpoint.list_steps(copied.out) == [3]
    assert {path.name for path in (copied.out / "step_00000005.damaged").iterdir()} >= {"config.json"}
    copied.prune(Best(3, 1.5))
    assert (copied.out / "step_00000005.damaged").exists()


@pytest.fixture
def pruned(tmp_path):
    """A run whose checkpoint of step 5 knows a best of step 3, which went when that of step 7 was better."""
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path / "run")), CORPUS)
    trainer = runs.trainer(run.config)
    run.write_documents()
    for step, best in ((5, Best(3, 1.5)), (7, Best(7, 1.2))):
        state = trainer.init()
        checkpoint.save(run.out, step, state._replace(step=state.step + step), run.documents(step, best))
    (checkpoint.step_folder(run.out, 7) / "arrays.npy").write_bytes(b"")
    return run


def test_a_best_that_was_deleted_is_none(pruned):
    trainer = runs.trainer(pruned.config)
    state, best = pruned.restore(trainer)
    assert (int(state.step), best) == (5, Best())
    assert pruned.restore_params(trainer.model)[0] == 5
    assert pruned.restore_params(trainer.model, best.step)[0] == 5  # as at the end of a run


@pytest.mark.parametrize(("name", "step"), [("arrays.npy", 0), ("arrays.npy", 7), ("progress.json", 0)])
def test_damage_in_the_way_of_parameters_comes_with_a_way_out(pruned, name, step):
    model = runs.trainer(pruned.config).model
    (checkpoint.step_folder(pruned.out, 7) / name).write_bytes(b"")
    message = rf"step_00000007/{name} is .*; step=5 names another, or train --resume sets it aside$"
    with pytest.raises(RunError, match=message):
        pruned.restore_params(model, step)
    assert pruned.restore_params(model, 5)[0] == 5
    (checkpoint.step_folder(pruned.out, 5) / "arrays.npy").write_bytes(b"")
    with pytest.raises(RunError, match=r"step_00000005/arrays.npy is truncated: .*; step=7 names another$"):
        pruned.restore_params(model, 5)
    shutil.rmtree(checkpoint.step_folder(pruned.out, 5))
    with pytest.raises(RunError, match=rf"step_00000007/{name} is [^;]*$"):
        pruned.restore_params(model, step)


def test_what_the_first_process_cannot_write_all_hear_of(saved, tmp_path, monkeypatch):
    told = note_texts(monkeypatch)
    (tmp_path / "file").touch()
    nowhere = dataclasses.replace(saved, config=saved.config.replace(out=str(tmp_path / "file" / "run")))
    with pytest.raises(RunError, match="Not a directory"):
        nowhere.write_documents()
    with pytest.raises(RunError, match=r"cannot write in .*Not a directory"), nowhere.locked():
        pass
    assert ["Not a directory" in words for words in told] == [True, True]


def test_without_a_sound_checkpoint_nothing_is_touched(copied):
    for step in (3, 5):
        (checkpoint.step_folder(copied.out, step) / "tree.pkl").write_bytes(b"")
    with pytest.raises(RunError, match=r"step_00000005/tree.pkl cannot be read.*; no checkpoint in .* is sound"):
        copied.restore(runs.trainer(copied.config))
    assert checkpoint.list_steps(copied.out) == [3, 5]


def test_what_is_no_damage_is_no_reason_to_go_back(copied):
    other = dataclasses.replace(copied, config=copied.config.replace(d_ff=64))
    with pytest.raises(UsageError, match=r"config\.json has d_ff=64, but step_00000005 was trained with d_ff=null;"):
        other.restore(runs.trainer(other.config))
    assert checkpoint.list_steps(copied.out) == [3, 5]


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"best": 3}', '{"best": {"step": 3}}', '{"best": {"step": "x", "val_loss": 1}}',
     '{"best": {"step": 3, "val_loss": []}}', '{"best": {"step": Infinity, "val_loss": 1}}',
     '{"best": {"step": 3, "val_loss": NaN}}', "[" * 100_000],
)  # fmt: skip
def test_progress_that_says_something_else_is_damage(tmp_path, content):
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path / "run")), CORPUS)
    trainer = runs.trainer(run.config)
    folder = checkpoint.save(run.out, 5, trainer.init(), run.documents(5, Best()) | {"progress.json": content})
    with pytest.raises(RunError, match=f"{folder / 'progress.json'} is damaged"):
        run.restore(trainer)


def test_a_folder_in_use_is_refused(copied):
    with (
        copied.locked(),
        pytest.raises(UsageError, match=rf"{copied.out} is in use by process {os.getpid()} on"),
        copied.locked(),
    ):
        pass
    with copied.locked():
        pass


def test_other_text_is_refused_and_the_same_text_may_move(saved):
    moved = make_corpus("elsewhere.txt", *TEXTS)
    saved.check_corpus(moved)
    assert saved.with_corpus(moved).config == saved.config.replace(data="elsewhere.txt")
    with pytest.raises(UsageError, match=r"data=elsewhere\.txt is not what .* was trained on"):
        saved.check_corpus(make_corpus("elsewhere.txt", *TEXTS[:2], "abe"))
