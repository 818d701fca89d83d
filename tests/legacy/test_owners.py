"""Every command of OWNERS.md runs, from a checkpoint that mesh-transformer-jax wrote under jax 0.4.13."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from shardformer.convert import gptj_settings, gptj_state
from tests.asserts import relative
from tests.launch import QUICK_COMPILATION

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGE = (ROOT / "shardformer" / "legacy" / "OWNERS.md").read_text()
BLOCKS = re.findall(r"```\n(.*?)```", PAGE.replace("\\\n", " "), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
TRAIN = "device_train.py"
STEPS = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz O.\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "MESH_TRANSFORMER_JAX" not in os.environ,
        reason="did not run: MESH_TRANSFORMER_JAX does not name a checkout of mesh-transformer-jax",
    ),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder of an owner: the checkout, a small checkpoint of 8 shards, a text, and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("owner")
    theirs = folder / "mesh-transformer-jax"
    shutil.copytree(os.environ["MESH_TRANSFORMER_JAX"], theirs, copy_function=shutil.copyfile)
    for path in (theirs, *theirs.rglob("*")):
        path.chmod(0o755)
    with tarfile.open(ROOT / "tests" / "convert" / "goldens" / "gptj.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    shutil.move(folder / "rotary-8", theirs / "step_383500")
    for path in (theirs / "step_383500").glob("shard_*/*.npz"):
        widen(path)
    sizes = json.loads((theirs / "step_383500" / "config.json").read_text())
    example = theirs / "configs" / "example_config.json"
    small = {"total_steps": STEPS, "gradient_accumulation_steps": 2, "warmup_steps": 1, "anneal_steps": 3}
    example.write_text(json.dumps(json.loads(example.read_text()) | sizes | small))
    (theirs / "mine.txt").write_text("Once upon a time. " * 300)
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    (theirs / "gpt2").mkdir()
    tokenizer.save(str(theirs / "gpt2" / "tokenizer.json"))
    return theirs


def widen(path: Path) -> None:
    """Makes bfloat16 arrays float32, as a checkpoint to train on has them: bfloat16 loses the steps of a small rate."""
    stored = dict(np.load(path))
    is_bfloat16 = {name: array.dtype.itemsize == 2 for name, array in stored.items()}
    wide = {name: array.view(jnp.bfloat16).astype(np.float32) for name, array in stored.items() if is_bfloat16[name]}
    np.savez(path, **(stored | wide))


def run(command: str, folder: Path) -> tuple[int, str, str]:
    """Runs a line of a shell with one prompt as its input."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE / 'owner_stubs'}",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {QUICK_COMPILATION}",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, input="Once upon\n", capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def set_steps(folder: Path, steps: int) -> None:
    config = folder / "configs" / "mine.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"total_steps": steps}))


@pytest.fixture(scope="module")
def outputs(theirs):
    """The standard output of each command, in the order of the page."""
    printed = {}
    for command in COMMANDS:
        if "to_hf_weights" in command and importlib.util.find_spec("torch") is None:
            continue
        if TRAIN in command:  # the first one is interrupted after a step
            set_steps(theirs, 1 if "--tune-model-path" in command else STEPS)
        status, out, error = run(command.replace("step_72", f"step_{STEPS}"), theirs)
        wanted = 1 if "device_sample" in command else 0  # it ends for lack of a second prompt
        assert status == wanted, (command, error[-4000:])
        assert wanted == 0 or "EOFError" in error
        printed[command] = out
    return printed


def output_of(outputs, word: str) -> list[str]:
    return [out for command, out in outputs.items() if word in command]


def test_training_starts_from_the_checkpoint_and_goes_on(outputs):
    tuned, resumed = output_of(outputs, TRAIN)
    assert "path to load checkpoint from: step_383500/" in tuned
    assert "state will be restored from checkpoint 1" in resumed
    assert all("training completed!" in out for out in (tuned, resumed))


def test_samples_are_drawn(outputs):
    (sampled,), (served,) = output_of(outputs, "device_sample"), output_of(outputs, "device_serve")
    assert "sample 0: " in sampled
    assert len(json.loads(json.dumps(served))) > 200
    assert len(output_of(outputs, " sample mine")[0]) > 20


def arrays(folder: Path, config):
    state = gptj_state.open_state(folder, config)
    return {name: np.asarray(array, np.float32) for name, array in state.params.items()}


def test_the_way_back_is_the_same_model(outputs, theirs):
    config, _ = gptj_settings.read_config(theirs / "configs" / "mine.json")
    slim = arrays(theirs / "my-bucket" / "finetune_dir_slim" / f"step_{STEPS}", config)
    back = arrays(theirs / "step_back", config)
    full = arrays(theirs / "my-bucket" / "finetune_dir" / f"step_{STEPS}", config)
    assert max(relative(back[name], slim[name]) for name in slim) == 0
    base = arrays(theirs / "step_383500", config)
    assert 0 < max(relative(full[name], slim[name]) for name in slim) < 0.01  # rounded to bfloat16
    assert all(relative(full[name], base[name]) > 0 for name in base)


@pytest.mark.parametrize(
    ("script", "advice"),
    [
        ("train.py", "device_train.py and `harness` do not"),
        ("eval_harness.py", "`convert` the checkpoint and run `harness`"),
    ],
)
def test_a_script_of_pods_says_what_replaces_it(theirs, script, advice):
    status, _, error = run(f"python -m shardformer legacy {script} --config configs/example_config.json", theirs)
    assert status == 1
    assert advice in error.splitlines()[-1]


SMALL = {'"layers": 28': '"layers": 2', '"d_model": 4096': '"d_model": 32', '"n_heads": 16': '"n_heads": 8',
         '"n_vocab": 50400': '"n_vocab": 32', '"pe_rotary_dims": 64': '"pe_rotary_dims": 2',
         '"seq": 2048': '"seq": 24', "gen_len=512": "gen_len=8"}  # fmt: skip


def shrink(source: str) -> str:
    for published, small in SMALL.items():
        source = source.replace(published, small)
    return source


def test_cells_of_the_notebook_run_with_small_sizes(theirs):
    cells = json.loads((theirs / "colab_demo.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    model = "\n".join(source for source in sources[2:] if "get_ipython" not in source and "unicorns" not in source)
    install = "import shardformer.legacy\nshardformer.legacy.install()\n"
    (theirs / "demo.py").write_text(install + shrink(model))
    status, out, error = run("python demo.py", theirs)
    assert status == 0, error[-4000:]
    assert "EleutherAI is" in out


def test_resharding_example_reads_the_way_back(outputs, theirs):
    example = shrink((theirs / "resharding_example.py").read_text())
    (theirs / "small_example.py").write_text(example.replace("step_383500/", "step_back/"))
    status, out, error = run("python -m shardformer legacy small_example.py", theirs)
    assert status == 0, error[-4000:]
    assert "completion done" in out
