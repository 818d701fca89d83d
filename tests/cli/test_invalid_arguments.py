"""Invalid arguments: one message with the fix, the right exit status, and nothing written or changed."""

import jax
import pytest

from shardformer.analysis import explain
from shardformer.training.run_folder import Run
from tests import runs
from tests.runs import FAILED, USAGE
from tests.surroundings import let_fail

LBFGS = ("optimizer=lbfgs", "clip=0", "weight_decay=0")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("unknown command 'trian'; did you mean 'train'?", ["trian", "tiny"]),
        ("name a preset: tiny, shakespeare_cpu", ["train"]),
        ("train takes a preset or --resume RUN, not both", ["train", "tiny", "--resume", "run"]),
        (
            "lora_rank trains adapters beside the frozen weights of a trained run; name it: base=RUN",
            ["train", "tiny", "lora_rank=2"],
        ),
        ("lr_rules: foo=2x matches no parameter", ["show", "tiny", "lr_rules=foo=2x"]),
        ("lr_rules takes factors up to 1e+06x, got 'embed=1e39x'", ["show", "tiny", "lr_rules=embed=1e39x"]),
        ("pipeline_rounds does nothing without pipeline stages", ["train", "tiny", "mesh=2x1", "pipeline_rounds=2"]),
        *(
            (
                "special_tokens does nothing with a tokenizer that has none",
                ["train", "tiny", "special_tokens=true", f"tokenizer={name}"],
            )
            for name in ("chars", "bytes", "ids")
        ),
        (
            "text does nothing without data from .jsonl records; name them with data=; got text='body'",
            ["train", "tiny", "text=body"],
        ),
        ("tokenizer is empty; give chars", ["data", "prepare", "x.txt", "tokenizer=", "out=prepared"]),
        ("layers takes a whole number, got '1__0'", ["show", "tiny", "layers=1__0"]),
        ("unknown command 'trian'; did you mean 'train'?", ["help", "trian"]),
        ("unknown preset 'tyny'; did you mean 'tiny'?", ["train", "tyny"]),
        ("unknown preset 'layers=2'", ["train", "layers=2"]),
        ("unknown key 'layer'; did you mean 'layers'?", ["train", "tiny", "layer=2"]),
        ("expected key=value, got '--layers'", ["train", "tiny", "--layers", "2"]),
        ("unknown key 'num_train_epochs'; did you mean 'epochs'?", ["train", "tiny", "num_train_epochs=3"]),
        (
            "steps=20 and epochs=3 both choose the length of the run; leave steps out, or give epochs=0 steps=20",
            ["train", "tiny", "epochs=3", "steps=20"],
        ),
        *(
            ("epochs= counts the rows of the data, which only train reads; give steps=", [*words, "tiny", "epochs=3"])
            for words in (["plan"], ["show"], ["verify"], ["sweep", "seeds=2"], ["bench", "step"])
        ),
        ("depth=4 chooses the steps; leave epochs out, or name a preset", ["train", "depth=4", "epochs=3"]),
        ("unknown key 'packing'; rows are packed already; documents=masked", ["train", "tiny", "packing=true"]),
        ("unknown key 'report_to'; TensorBoard's events are always", ["train", "tiny", "report_to=wandb"]),
        ("unknown key '--batch_size'; did you mean 'batch'?", ["train", "tiny", "--batch_size=8"]),
        ("simpo, task; got 'ppo'\n", ["train", "tiny", "objective=ppo"]),
        ("unknown key 'system'; the keys are step, ema, ", ["serve", "run", "system=x"]),
        (
            f"frozen, such as bias=10x; got '{'a' * 79}... (100,002 characters)",
            ["train", "tiny", f"lr_rules={'a' * 100_000}"],
        ),
        ("layers takes a whole number, got 'two'", ["train", "tiny", "layers=two"]),
        ("lr is given twice", ["train", "tiny", "lr=1", "lr=2"]),
        (
            "sweep=true ranks all dp x mp meshes with and without ZeRO and remat; leave out mesh, zero",
            ["plan", "tiny", "sweep=true", "zero=1", "mesh=4x2"],
        ),
        (
            "compiler=libtpu compiles for TPUs, got chip=h100:8; give compiler=cpu or none",
            ["plan", "tiny", "chip=h100:8", "compiler=libtpu"],
        ),
        ("picture takes the name of a file that ends in .png", ["plan", "tiny", "sweep=true", "picture=x.foo"]),
        ("picture=no/x.png: folder no does not exist; make it", ["memory", "tiny", "picture=no/x.png"]),
        ("json=no/x: folder no does not exist; make it first", ["bench", "step", "json=no/x"]),
        ("out=no/x.png: folder no does not exist; make it", ["plot", "run", "out=no/x.png"]),
        ("zero=1 splits over dp, and mesh=1x8 has dp=1; give zero=0", ["train", "tiny", "mesh=1x8", "zero=1"]),
        ("splits the context) or auto, got '9999", ["train", "tiny", "mesh=" + 5000 * "9" + "x1"]),
        ("MB of disk, and", ["bench", "checkpoint", "mb=99999999999"]),
        ("data=nowhere.txt does not exist; data takes auto", ["train", "tiny", "data=nowhere.txt"]),
        ("eval_prompts=nope cannot be read: No such file", ["train", "tiny", "data=nowhere.txt", "eval_prompts=nope"]),
        ("data=~no_such_user/x does not exist", ["train", "tiny", "data=~no_such_user/x"]),
        ("data=/dev/zero is a device or a pipe, which", ["data", "prepare", "/dev/zero", "out=new", "tokenizer=bytes"]),
        ("data=. is a folder without text files", ["train", "tiny", "data=."]),
        ("train --resume takes the folder of a run", ["train", "--resume"]),
        ("train --resume takes the folder of a run", ["train", "--resume", "steps=9"]),
        ("train --resume takes the folder of a run", ["train", "--resume="]),
        ("nowhere is not a run: the folder does not exist", ["train", "--resume", "nowhere"]),
        (". is not a run: it has no config.json", ["sample", "."]),
        ("base=gpt2 does not exist; give the folder of a run, or the one into", ["train", "base=gpt2", "data=x"]),
        ("nowhere is not a run: the folder does not exist", ["plot", "nowhere"]),
        ("name the folder of a run first", ["sample"]),
        ("name the folder of a run first", ["sample", "prompt=ROMEO:"]),
        ("name the folder of a run first", ["eval"]),
        ("data takes: prepare SRC ... out=FOLDER, show FOLDER|CHATS", ["data", "imprt", "x"]),
        ("cannot read nowhere.txt", ["data", "import", "nowhere.txt"]),
        ("name a preset", ["show"]),
        ("unknown preset", ["show", "large"]),
        ("runs/no is neither the folder of a run nor a preset; the presets are tiny", ["verify", "runs/no"]),
        ("vocab=2147483647 padded to vocab_multiple=8 must be below 2**31", ["show", "tiny", "vocab=2147483647"]),
        ("is too long for a name", ["eval", "x" * 300]),
        ("is too long for a name", ["plot", "x" * 300]),
        ("a\\nb\\x1b[31m is not a run: the folder does not exist", ["eval", "a\nb\x1b[31m"]),
    ],
)
def test_invalid_arguments(refused, message, words):
    refused(USAGE, message, *words)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ("is empty: its 90/5/5 split needs two characters in each part", b""),
        ("is too short (3 characters)", b"abc"),
        ("is not UTF-8: invalid start byte (0xFF) at byte 2; convert it", b"ab\xff" * 100),
        ("has 90 tokens, and a window of seq=128 needs 129; take a longer text or seq=89", b"ab" * 50),
    ],
)
def test_wrong_texts(refused, tmp_path, message, content):
    (tmp_path / "text.txt").write_bytes(content)
    refused(USAGE, message, "train", "tiny", "mesh=1x1", "seq=128", "data=text.txt")


def test_a_file_that_is_not_tiny_shakespeare(refused, text):
    refused(USAGE, "is not tiny_shakespeare's input.txt: expected 1,115,394 bytes", "data", "import", text)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("mesh=2x5 takes 10 devices", ["mesh=2x5", "heads=5", "d_model=40", "vocab_multiple=10", "rotary_dims=8"]),
        ("mesh=16x1 takes 16 devices", ["mesh=16x1", "batch=16"]),
        ("vocab=10 is less than the 63 characters of", ["vocab=10"]),
        ("is a file; name a folder", ["out=file"]),
    ],
)
def test_values_that_do_not_fit_the_machine_are_rejected(refused, text, tmp_path, message, words):
    (tmp_path / "file").touch()
    refused(USAGE, message, "train", "tiny", f"data={text}", *words)


@pytest.mark.parametrize("pictures", ["file", "file/within"])
def test_pictures_inside_a_file_are_rejected(refused, tmp_path, monkeypatch, pictures):
    (tmp_path / "file").touch()
    let_fail(monkeypatch, explain, "tour", AssertionError("it computes before it refuses"))
    refused(USAGE, f"pictures={pictures} is a file, or inside one; name a folder", "explain", f"pictures={pictures}")


def test_out_that_cannot_be_made_is_rejected(refused, text, tmp_path):
    (tmp_path / "file").touch()
    refused(FAILED, "Not a directory", "train", "tiny", "mesh=1x1", f"data={text}", "out=file/run")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("run already holds a run; go on with `train --resume run`", ["train", "tiny", "data=builtin", "out=run"]),
        ("layers cannot change on resume: the run has 2, got 3", ["train", "--resume", "run", "layers=3"]),
        ("pipeline_rounds does nothing without pipeline stages", ["train", "--resume", "run", "pipeline_rounds=2"]),
        ("text=body does nothing: ", ["train", "--resume", "run", "text=body"]),
        ("batch cannot change on resume: the run has 8, got 16", ["train", "--resume", "run", "batch=16"]),
        ("run is at step 4 already, got steps=3; give more", ["train", "--resume", "run", "steps=3", "data=nowhere"]),
        ("out cannot change on resume", ["train", "--resume", "run", "out=other"]),
        ("data=builtin is not what run was trained on", ["train", "--resume", "run", "data=builtin"]),
        ("unknown key 'tokeniser'; did you mean 'tokenizer'?", ["train", "--resume", "run", "tokeniser=9"]),
        ("mesh=16x1", ["train", "--resume", "run", "mesh=16x1"]),
        ("prompt: character 'é' (U+00E9) at index 2 (line 1, column 3)", ["sample", "run", "prompt=abé"]),
        ("prompt is empty", ["sample", "run", "prompt="]),
        ("top_p must be above 0 and at most 1, got 2.0", ["sample", "run", "top_p=2"]),
        ("temperature must be 0 or more, got nan", ["sample", "run", "temperature=nan"]),
        ("tokens must be at least 1, got 0", ["sample", "run", "tokens=0"]),
        ("tokens must be at most 10,000,000, got 99,999,999,999", ["sample", "run", "tokens=99999999999"]),
        ("seed must be in 0..2**31 - 1", ["sample", "run", "seed=99999999999999999999"]),
        ("run has no checkpoint of step 3; there are 4", ["sample", "run", "step=3"]),
        ("heads=8 does not divide over mp=3", ["sample", "run", "mesh=1x3"]),
        ("unknown key 'temprature'; did you mean 'temperature'?", ["sample", "run", "temprature=1"]),
        ("split is one of train, validation, test, all; got 'dev'", ["eval", "run", "split=dev"]),
        ("validation does nothing without data", ["eval", "run", "validation=0.1"]),
        ("run has no checkpoint of step 9", ["eval", "run", "step=9"]),
        ("run/config.json is not a run", ["sample", "run/config.json"]),
        ("format=hf is not one; leave one of them out", ["convert", "run", "new", "format=hf", "weights=nf4"]),
    ],
)  # fmt: skip
def test_what_a_run_refuses(refused, run, message, words):
    refused(USAGE, message, *words)


def test_shards_of_gptj_are_no_run(refused, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/config.json").write_text('{"layers": 28, "n_heads": 16}')
    refused(USAGE, "shards is GPT-J's shards; make a run of it first: convert shards RUN", "sample", "shards")


def test_a_text_that_has_changed(refused, run, tmp_path):
    runs.text(tmp_path, 19_999)
    refused(USAGE, "is not what run was trained on: that was", "train", "--resume", "run", "data=text.txt")
    changed = "so what the file holds or validation= has changed; bring the old data back"
    refused(USAGE, changed, "train", "--resume", "run", "validation=0.1")


def test_more_memory_than_there_is(refused, text, monkeypatch):
    # Raised by hand: a CPU that runs out while it computes never answers.
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")
    let_fail(monkeypatch, Run, "restore", error)
    refused(FAILED, "out of memory (RESOURCE_EXHAUSTED", "train", "tiny", "mesh=4x2", f"data={text}")


def test_a_run_that_is_called_as_a_preset_is_not_taken_for_it(refused, run, text):
    run.rename(run.with_name("tiny"))
    words = ["train", "tiny", "mesh=4x2", f"data={text}"]
    refused(USAGE, "tiny already holds a run", *words, "out=tiny")
    run.with_name("tiny").rename(run)
    refused(USAGE, "run is a run; to continue it: train --resume run", "train", "run")


def test_a_run_that_began_while_this_one_waited(refused, run, text, monkeypatch):
    seen = iter([None])
    check = Run.refuse_to_overwrite
    monkeypatch.setattr(Run, "refuse_to_overwrite", lambda self: next(seen, "") is None or check(self))
    refused(USAGE, "run already holds a run", "train", "tiny", "mesh=4x2", f"data={text}", "steps=4", "out=run")
