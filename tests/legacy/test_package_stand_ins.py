"""Where a package is not installed, a script gets its stand-in; a library that only tries to import it does not."""

import importlib.util
import sys
from importlib.machinery import PathFinder

import pytest

from shardformer.legacy import array_members, package_stand_ins
from shardformer.legacy.install import installed
from shardformer.legacy.lost_names import FLAX_MODELS
from shardformer.legacy.missing_packages import missing_imports
from shardformer.legacy.stand_ins import buckets, smart_open

HIDDEN = ("google.cloud", "ray", "smart_open", "wandb", "transformers")
IMPORTS = "import ray, wandb\nfrom smart_open import open\nfrom google.cloud import storage\n"
NOTE = "wandb is not installed: pip install wandb (without it, nothing is logged)"
SCRIPT = IMPORTS + "from google.cloud.exceptions import NotFound\n"


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """Hides the packages from Python, except those in the folder that it returns, which is the working directory."""
    find = PathFinder.find_spec

    def find_others(name, path=None, target=None):
        spec = find(name, path, target)
        is_hidden = spec is not None and any(f"{name}.".startswith(f"{hidden}.") for hidden in HIDDEN)
        home = spec and str(spec.origin or next(iter(spec.submodule_search_locations)))
        return None if is_hidden and not home.startswith(str(tmp_path)) else spec

    for name in [name for name in sys.modules if any(f"{name}.".startswith(f"{hidden}.") for hidden in HIDDEN)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(PathFinder, "find_spec", find_others)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    package_stand_ins._say.cache_clear()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("transformers", "smart_open", "wandb"))]:
        del sys.modules[name]


def run(source: str, file: str = "script.py") -> dict:
    names = {}
    exec(compile(source, file, "exec"), names)
    return names


def test_a_script_gets_stand_ins_and_a_line_about_each(nothing_installed, capsys):
    with installed():
        names = run(SCRIPT)
        run(SCRIPT)
    assert names["NotFound"] is not None
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["ray", "wandb", "smart_open", "google.cloud"]
    assert lines[1] == f"shardformer.legacy: {NOTE}"


@pytest.mark.parametrize("name", ["ray", "wandb", "smart_open", "google.cloud.storage"])
def test_a_library_gets_none(nothing_installed, name):
    with installed(), pytest.raises(ModuleNotFoundError, match=name.rpartition(".storage")[0] or name):
        run(f"import {name}", "lib/python/site-packages/library.py")


def test_a_script_in_a_folder_of_packages_is_no_library(nothing_installed):
    with installed():
        assert run("import wandb", "my-packages/script.py")["wandb"].run is None


def test_a_folder_without_code_is_no_package(nothing_installed):
    (nothing_installed / "wandb" / "run-1" / "files").mkdir(parents=True)
    (nothing_installed / "wandb" / "run-1" / "files" / "train.py").touch()  # as wandb saves the code of a run
    with installed():
        assert list(missing_imports("import wandb")) == [(1, "wandb")]
        assert run("import wandb")["wandb"].init().config == {}
    (nothing_installed / "wandb" / "own.py").touch()
    with installed():
        assert not list(missing_imports("import wandb"))
        assert run("import wandb.own")["wandb"].own


def test_a_question_whether_one_is_installed_is_answered_with_no(nothing_installed):
    with installed():
        assert importlib.util.find_spec("wandb") is None
        assert importlib.util.find_spec("ray") is None


def test_stand_ins_go_with_uninstall(nothing_installed):
    with installed():
        run(SCRIPT)
    for name in ("ray", "wandb", "google.cloud.storage"):
        with pytest.raises(ModuleNotFoundError):
            run(f"import {name}")


def test_an_installed_package_is_used(nothing_installed):
    (nothing_installed / "wandb.py").write_text("mine = True\n")
    with installed():
        assert run("import wandb")["wandb"].mine


def test_installed_smart_open_reads_buckets_as_folders(nothing_installed):
    (nothing_installed / "smart_open.py").write_text("def open(uri, mode, **options):\n    return f'theirs: {uri}'\n")
    (nothing_installed / "bucket").mkdir()
    with installed():
        opened = run("from smart_open import open")["open"]
        assert opened("s3://bucket/a") == "theirs: s3://bucket/a"
        assert opened("gs://bucket/folder/a.gz", "w") == "theirs: bucket/folder/a.gz"
    assert (nothing_installed / "bucket" / "folder").is_dir()
    assert run("from smart_open import open")["open"]("gs://bucket/a", "r") == "theirs: gs://bucket/a"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A bucket with two checkpoints, each a folder of one shard."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bucket").mkdir()
    for step in (1, 10):
        with smart_open.open(f"gs://bucket/model/step_{step}/shard_0/0.npz", "wb") as file:
            file.write(b"bytes")
    return tmp_path / "bucket"


def test_missing_object_is_not_found_and_bucket_is_advised(bucket):
    assert smart_open.open("gs://bucket/model/step_1/shard_0/0.npz", "rb").read() == b"bytes"
    with pytest.raises(buckets.NotFound, match=r"gs://bucket/meta\.json: no file bucket/meta\.json"):
        smart_open.open("gs://bucket/meta.json")
    with pytest.raises(FileNotFoundError, match="no folder 'other', which would stand for the bucket; make it"):
        smart_open.open("gs://other/meta.json", "w")


def test_other_schemes_and_compressed_files_are_rejected(bucket):
    (bucket / "plain.txt").write_text("text")
    (bucket / "plain.txt.gz").touch()
    for path in (bucket / "plain.txt", "gs://bucket/plain.txt"):
        assert smart_open.open(path, transport_params={}).read() == "text"
    for path in ("s3://bucket/plain.txt", "plain.txt.gz", "gs://bucket/plain.txt.gz"):
        with pytest.raises(NotImplementedError, match="pip install smart_open"):
            smart_open.open(path)


def test_objects_of_a_prefix_are_listed_and_deleted(bucket):
    client = buckets.Client()
    (bucket.parent / "beside.txt").touch()
    assert [blob.name for blob in client.list_blobs("bucket", prefix="model/step_1")] == [
        "model/step_1/shard_0/0.npz",
        "model/step_10/shard_0/0.npz",
    ]
    for blob in client.list_blobs("bucket", prefix="model/step_1/"):
        blob.delete()
    assert sorted(path.name for path in (bucket / "model").iterdir()) == ["step_10"]
    for blob in client.list_blobs("bucket"):
        blob.delete()
    assert list(bucket.iterdir()) == []


RAY = """
import ray
@ray.remote
def plain(x): return x + 1
@ray.remote(num_cpus=2)
def with_options(x): return x + 2
ray.is_initialized() or ray.init(num_cpus=2)
got = ray.get([plain.remote(1), with_options.options(num_cpus=1).remote(ray.put(1))])
ray.shutdown()
"""
ACTOR = "import ray\n@ray.remote(resources={'tpu': 1})\nclass Runner: pass"


def test_remote_functions_run_here_and_actors_are_rejected(nothing_installed):
    with installed():
        assert run(RAY)["got"] == [2, 3]
        with pytest.raises(ModuleNotFoundError, match="Runner is an actor of ray") as caught:
            run(ACTOR)
        array_members.advise(caught.value)
    assert "device_train.py and `harness` do not" in caught.value.__notes__[0]


WANDB = """
import argparse, wandb
with wandb.init('project', config={'lr': 1}) as run:
    wandb.watch(None, log='all')
    table = wandb.Table(columns=['text'])
    table.add_data('text')
    wandb.log({'image': wandb.Image([[0]], caption=''), 'weights': wandb.Histogram([1]), 'texts': table}, 1)
    wandb.config.update(argparse.Namespace(lr=3), allow_val_change=True)
    wandb.config.batch = 2
    run.log({})
rate = wandb.config.lr
wandb.finish()
"""


def test_wandb_keeps_nothing_and_what_it_lacks_is_advised(nothing_installed):
    with installed():
        names = run(WANDB)
        assert names["run"] is names["wandb"].run
        assert names["run"].config == {"lr": names["rate"], "batch": 2} == {"lr": 3, "batch": 2}
        for line in ("wandb.Artifact", "from wandb import Artifact"):
            with pytest.raises((AttributeError, ImportError)) as caught:
                run(f"import wandb\n{line}")
            array_members.advise(caught.value)
            assert caught.value.__notes__ == [NOTE]


def test_an_error_of_another_module_is_not_advised():
    with pytest.raises(AttributeError) as caught:
        run("import json\njson.Artifact")
    array_members.advise(caught.value)
    assert not hasattr(caught.value, "__notes__")


def test_tokenizers_have_the_table_of_sizes_while_installed(nothing_installed):
    (nothing_installed / "transformers").mkdir()
    (nothing_installed / "transformers" / "__init__.py").write_text("")
    base = nothing_installed / "transformers" / "tokenization_utils_base.py"
    base.write_text("class PreTrainedTokenizerBase: pass")
    source = "from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Base"
    with installed():
        run(f"{source}\nBase.max_model_input_sizes['gpt2'] = 1e20")
    assert not hasattr(run(source)["Base"], "max_model_input_sizes")


OLD_GENERATION = "from transformers.generation_flax_utils import FlaxSampleOutput as Output"


def test_old_names_of_flax_modules_are_the_modules(nothing_installed, capsys):
    generation = nothing_installed / "transformers" / "generation"
    generation.mkdir(parents=True)
    for folder in (generation, generation.parent):
        (folder / "__init__.py").write_text("")
    (generation / "flax_utils.py").write_text("class FlaxSampleOutput: pass")
    with installed():
        assert run(OLD_GENERATION)["Output"] is sys.modules["transformers.generation.flax_utils"].FlaxSampleOutput
        (generation / "flax_utils.py").unlink()
        for name in [name for name in sys.modules if name.startswith("transformers.")]:
            del sys.modules[name]
        with pytest.raises(ModuleNotFoundError) as caught:
            run(OLD_GENERATION)
        array_members.advise(caught.value)
    assert caught.value.__notes__ == [f"transformers.generation.flax_utils is not installed: {FLAX_MODELS}"]
    assert capsys.readouterr().err == ""
