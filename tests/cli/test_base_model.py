"""`train base=FOLDER data=...`: the model is the folder's, be it a run or a Hugging Face folder."""

import json
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.child_process import make_environment
from shardformer.cli import base_model
from shardformer.config import Config, presets
from shardformer.convert import hf_settings
from shardformer.data import SpecialTokens, TokenIds
from shardformer.data.hf_tokenizer import train_bpe
from shardformer.data.vocabulary import Bytes
from shardformer.errors import UsageError
from shardformer.session import open_vocabulary_of_base
from shardformer.training.run_folder import Run
from tests import runs, shared
from tests.convert import reward_models
from tests.convert.hf_models import FOLDER

USAGE = 2


@pytest.mark.slow
def test_a_hugging_face_folder_is_tuned_and_goes_back(tmp_path, capsys):
    """On rows that it can learn: the loss falls, and what comes back is another model of the same shape."""
    source = shutil.copytree(FOLDER / "gpt2", tmp_path / "src")
    np.tile(np.arange(61), 300).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [f"base={source}", f"data={tmp_path / 'ids.bin'}", "steps=8", "lr=0.01", "warmup=1", "batch=8", "mesh=2x1",
             "eval_every=4", "save_every=0", "log_every=1", f"out={tmp_path / 'run'}"]  # fmt: skip
    assert runs.train(*words) == 0
    losses = [float(row["loss"]) for row in runs.rows(tmp_path / "run") if row["loss"]]
    assert losses[-1] < losses[0] - 0.5
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    assert hf_settings.read_config(tmp_path / "back") == hf_settings.read_config(source)
    assert (tmp_path / "back" / "model.safetensors").stat().st_size > 10_000
    capsys.readouterr()
    (tmp_path / "numbers.txt").write_text("0 1 2 3\n")
    assert main(["score", str(tmp_path / "run"), str(tmp_path / "numbers.txt")]) == 0
    total = json.loads(capsys.readouterr().out)
    assert (total["tokens"], total["nats_per_byte"]) == (3, None)  # the digits of an id are not its text
    again = [*words[:-1], f"out={tmp_path / 'other'}", "block=parallel"]
    shutil.copytree(tmp_path / "run.base", tmp_path / "other.base")
    capsys.readouterr()
    assert runs.train(*again) == USAGE
    assert "block=parallel contradicts base=" in capsys.readouterr().err


def test_the_tokenizer_of_a_base(tmp_path):
    """Its own whatever is named, unless it has ids alone; special tokens of a text may mean themselves."""
    bpe = train_bpe(["a text <|endoftext|> of words " * 9], 270)
    (tmp_path / "tokenizer.json").write_text(bpe.text)
    named, settings = str(tmp_path / "tokenizer.json"), presets.preset("tiny").replace(base="base", vocab=300)
    bases = {
        "ids": (TokenIds(300), {"auto": TokenIds(300), named: bpe}, ("chars", "bpe:300")),
        "bytes": (Bytes(), {"auto": Bytes(), "bytes": Bytes()}, (named, "chars")),
        "bpe:270": (bpe, {"auto": bpe, named: bpe, "bpe:270": bpe}, ("bytes", "ids")),
    }
    for name, (vocabulary, accepted, refused) in bases.items():
        run = Run(settings.replace(tokenizer=name), vocabulary, "")
        with mock.patch.object(Run, "open", return_value=run):
            for tokenizer, expected in accepted.items():
                assert open_vocabulary_of_base(settings.replace(tokenizer=tokenizer)) == expected
            for tokenizer in refused:
                with pytest.raises(UsageError, match="contradicts base=base, which was trained on tokens of"):
                    open_vocabulary_of_base(settings.replace(tokenizer=tokenizer))
            if vocabulary is bpe:
                text = "a<|endoftext|>"
                asked = open_vocabulary_of_base(settings.replace(special_tokens=True))
                assert len(asked.encode(text)) == 2 < len(bpe.encode(text))


def test_bos_true_takes_the_beginning_of_the_base():
    bpe, settings = train_bpe(["a text of words " * 9], 270), presets.preset("tiny").replace(base="base", vocab=300)
    base = Run(settings.replace(tokenizer="bpe:270"), bpe, "", SpecialTokens(beginning=7, tokenizer_beginning=5))
    with mock.patch.object(Run, "open", return_value=base):
        assert open_vocabulary_of_base(settings.replace(bos="true")).beginning == (5,)
        assert open_vocabulary_of_base(settings).beginning == ()


@pytest.mark.slow
def test_ignore_config_passes_to_the_conversion(tmp_path, capsys):
    source = shutil.copytree(FOLDER / "gpt2", tmp_path / "src")
    theirs = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(theirs | {"made_up": 7}))
    words = [f"base={source}", f"out={tmp_path / 'run'}"]
    assert main(["train", *words, "data=x"]) == USAGE
    assert "made_up=7 is not known here" in capsys.readouterr().err
    settings = base_model.parse_base([*words, "ignore_config=made_up"])
    assert (settings.training.base, settings.model.layers) == (str(tmp_path / "run.base"), 2)


def test_ignore_config_is_only_for_hugging_face(tmp_path):
    assert main(["convert", str(FOLDER / "gpt2"), str(tmp_path / "run")]) == 0
    with pytest.raises(UsageError, match="ignore_config=x is for a base in Hugging Face's format"):
        base_model.parse_base([f"base={tmp_path / 'run'}", "ignore_config=x"])


@pytest.mark.slow
def test_a_run_is_a_base_without_naming_its_shape(tmp_path, text):
    assert runs.train("tiny", "mesh=1x1", f"data={text}", "steps=1", f"out={tmp_path / 'base'}") == 0
    words = [f"base={tmp_path / 'base'}", f"data={text}", "mesh=1x1", "batch=8", "steps=1", f"out={tmp_path / 'run'}"]
    assert runs.train(*words) == 0
    assert Run.open(tmp_path / "run").config.model.layers == Run.open(tmp_path / "base").config.model.layers == 2


def write_run(folder, **changes):
    """Writes the config.json of a run, which is all that the keys of a base are read from."""
    folder.mkdir()
    (folder / "config.json").write_text(shared.tiny(vocab=64, seq=16, **changes).to_json())
    return folder


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_rows_may_be_shorter_than_those_of_the_base(tmp_path, positions):
    base = write_run(tmp_path / "base", positions=positions)
    assert base_model.parse_base([f"base={base}", "data=x", "seq=8"]).model.seq == 8
    assert base_model.parse_base([f"base={base}", "data=x"]).model.seq == 16


@pytest.mark.parametrize(
    ("positions", "seq", "message"),
    [("learned", 8, "has seq=16 and a table of learned positions; leave seq= out"),
     ("rotary", 32, "has seq=16; leave seq= out")],
)  # fmt: skip
def test_rows_that_the_base_cannot_read_are_rejected(tmp_path, positions, seq, message):
    base = write_run(tmp_path / "base", positions=positions)
    with pytest.raises(UsageError, match=message):
        base_model.parse_base([f"base={base}", "data=x", f"seq={seq}"])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("base=nowhere does not exist; give the folder of a run", ["base=nowhere", "data=x"]),
        ("name a preset", []),
        ("base=nowhere does not exist; give the folder of a run", ["tiny", "base=nowhere", "data=x"]),
    ],
)
def test_bases_that_are_not_there(message, words, capsys):
    assert main(["train", *words]) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_preset_tunes_a_hugging_face_folder(tmp_path):
    """The documented `train gptj_6b_finetune base=HF_FOLDER data=...`: its settings, and the model of the folder."""
    np.tile(np.arange(61), 300).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [f"base={FOLDER / 'gptj'}", f"data={tmp_path / 'ids.bin'}", "steps=2", "warmup=1", "mesh=2x1",
             f"out={tmp_path / 'run'}"]  # fmt: skip
    assert runs.train("gptj_6b_finetune", *words) == 0
    tuned, preset = Run.open(tmp_path / "run").config, presets.preset("gptj_6b_finetune")
    assert (tuned.model.layers, tuned.model.embed, tuned.model.d_model) == (2, "plain", 64)
    assert (tuned.optimizer.param_dtype, tuned.optimizer.lr, tuned.parallel.remat, tuned.training.batch) == (
        "bfloat16",
        preset.optimizer.lr,
        "full",
        preset.training.batch,
    )
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    assert hf_settings.read_config(tmp_path / "back") == hf_settings.read_config(FOLDER / "gptj")


@pytest.mark.multiprocess
def test_another_base_is_not_what_was_converted_before(tmp_path):
    one, other = (shutil.copytree(FOLDER / "gpt2", tmp_path / name) for name in ("one", "other"))
    base_model.convert_once("base", str(one), tmp_path / "run.base")
    assert base_model.convert_once("base", str(one), tmp_path / "run.base")
    with pytest.raises(UsageError, match=r"was converted from .*one, not from .*other"):
        base_model.convert_once("base", str(other), tmp_path / "run.base")


def test_model_of_rewards_is_rejected_before_it_is_converted(tmp_path, capsys):
    source, out = reward_models.make_folder("qwen3", tmp_path / "rewards"), tmp_path / "run"
    assert main(["train", f"base={source}", "objective=dpo", f"data={tmp_path / 'pairs.jsonl'}", f"out={out}"]) == USAGE
    assert f"base={source} trained a reward model, which is no language model; give" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rewards"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("batch=7 does not divide over dp=2", ["batch=7", "mesh=2x1"]),
        ("lora_alpha does nothing without lora_rank", ["lora_alpha=8"]),
        ("layers=5 contradicts base=", ["layers=5"]),
        ("zero=1 splits over dp, and mesh=1x1 has dp=1", ["zero=1", "mesh=1x1"]),
        ("run already holds a run", []),
        ("data=nowhere.txt does not exist", ["data=nowhere.txt"]),
        ("nowhere.txt does not exist", ["validation=nowhere.txt"]),
        ("eval_prompts=nowhere.txt cannot be read", ["eval_prompts=nowhere.txt"]),
        ("objective=grpo learns from rewards, which each start names", ["objective=grpo", "answer_tokens=4"]),
    ],
)
def test_what_is_refused_is_refused_before_the_base_is_converted(tmp_path, capsys, message, words):
    out = tmp_path / "run"
    if not words:
        out.mkdir()
        (out / "config.json").write_text("{}")
    data = tmp_path / "ids.bin"
    np.tile(np.arange(61), 300).astype("<u2").tofile(data)
    named = [] if any(word.startswith("data=") for word in words) else [f"data={data}"]
    assert main(["train", f"base={FOLDER / 'gpt2'}", f"out={out}", *named, *words]) == USAGE
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*run.base*"))


def test_a_base_that_was_converted_before_says_what_its_model_is(tmp_path):
    """By hand, with a shorter context than the Hugging Face folder has."""
    target = tmp_path / "run.base"
    assert main(["convert", str(FOLDER / "gptj"), str(target), "seq=16"]) == 0
    settings = base_model.parse_base([f"base={FOLDER / 'gptj'}", f"out={tmp_path / 'run'}", "seq=16"])
    assert (settings.training.base, settings.model.seq) == (str(target), 16)
    assert hf_settings.read_config(FOLDER / "gptj")[1].model.seq > 16


def test_what_does_nothing_without_adapters_is_refused(tmp_path):
    base = write_run(tmp_path / "base")
    words = [f"base={base}", "data=builtin", f"out={tmp_path / 'run'}"]
    with pytest.raises(UsageError, match="lora_alpha does nothing without lora_rank"):
        base_model.parse_base([*words, "lora_alpha=32"])


def test_child_process_finds_all_packages_of_sys_path(tmp_path, monkeypatch):
    """A notebook may have added folders to sys.path, which a child process does not inherit."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "added_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "added")
    names = ("shardformer", "jax", "jinja2", "added_package")
    code = f"import importlib.util; print([importlib.util.find_spec(name) is not None for name in {names}])"
    command = [sys.executable, "-S", "-c", code]  # -S: without the folder of installed packages
    for environment, found in ((make_environment(), True), (None, False)):
        result = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
        assert result.strip() == str([found] * len(names))


def test_balance_rate_of_a_base_is_kept_with_adapters(tmp_path):
    base = Config.of(vocab=61, experts=4, bias="none", balance_rate=0.001, mesh="1x1")
    (tmp_path / "config.json").write_text(base.to_json())
    for words in ([], ["balance_rate=0.001"]):
        settings = base_model.parse_base([f"base={tmp_path}", "mesh=1x1", "lora_rank=2", *words])
        assert settings.experts.balance_rate == 0.001
        assert not settings.mixture.moves_router_bias
    with pytest.raises(UsageError, match=r"balance_rate=0.0 contradicts base=.*, which has balance_rate=0.001"):
        base_model.parse_base([f"base={tmp_path}", "mesh=1x1", "lora_rank=2", "balance_rate=0"])


def convert_into(target, monkeypatch) -> None:
    monkeypatch.setattr(base_model, "convert_in_process", lambda *_: "converted")
    base_model.convert_once("teacher", str(target.parent / "source"), target)


def test_conversion_beside_a_run_writes_through_no_link(tmp_path, monkeypatch):
    """A stranger's folder may have links where the teacher's origin and lock are written."""
    target, outside = tmp_path / "run.teacher", tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / ".run.teacher.source").symlink_to(outside)
    convert_into(target, monkeypatch)
    assert outside.read_text() == "mine"
    assert not (tmp_path / ".run.teacher.source").is_symlink()
    (tmp_path / ".run.teacher.lock").unlink(missing_ok=True)
    (tmp_path / ".run.teacher.lock").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic link"):
        convert_into(target, monkeypatch)
    assert not (tmp_path / "new").exists()
