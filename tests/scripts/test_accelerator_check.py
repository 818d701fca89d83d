"""scripts/accelerator_check.sh with a stand-in for Python: every part is on the page, and a failure is too."""

import os
import re
import subprocess
from pathlib import Path

from shardformer.bench import command_line
from shardformer.config import Config
from shardformer.config.parsing import parse_overrides
from shardformer.config.presets import PRESETS

ROOT = Path(__file__).parents[2]
# Prints what it is asked to run; a training writes its metrics. There are two devices, and no torch.
PYTHON = """#!/bin/bash
case "$*" in
    *"len(jax.devices())"*) echo 2 ;;
    "-c import torch") exit 1 ;;
    *" {fails}"*) echo "no such device"; exit 1 ;;
    *" train "*) for word in "$@"; do [[ $word != out=* ]] || {{ mkdir -p "${{word#out=}}"; echo 1,4.1 >"${{word#out=}}/metrics.csv"; }}; done ;;
    *) echo "RUN $*" ;;
esac
"""  # noqa: E501
PARTS = ["Versions", "Devices", "Sharded against dense", "Attention against plain attention", "Resume",
         "A step of 124M parameters", "A step of 1B parameters"]  # fmt: skip


def check(folder: Path, size: str = "", fails: str = "nothing") -> tuple[int, str]:
    """Returns the status of the script and its page."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.format(fails=fails))
    python.chmod(0o755)
    environment = os.environ | {"VENV": str(folder), "VENV_IS_READY": "1", "SIZE": size, "PATH": "/usr/bin:/bin"}
    command = ["bash", "scripts/accelerator_check.sh", str(folder / "page.md")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, (folder / "page.md").read_text()


def benches(page: str) -> list[list[str]]:
    return [line.split() for line in re.findall("^RUN -m shardformer bench (.*)$", page, re.MULTILINE)]


def test_every_part_of_the_check_is_on_the_page(tmp_path):
    status, page = check(tmp_path)
    assert status == 0
    assert re.findall("^## (.*)$", page, re.MULTILINE) == PARTS
    assert "every loss and norm is the same, bitwise" in page


def test_a_part_that_fails_is_on_the_page(tmp_path):
    status, page = check(tmp_path, fails="bench kernel")
    assert status == 1
    assert "## Attention against plain attention (FAILED, status 1)\n\n```\nno such device\n```" in page
    assert page.count("FAILED") == 1


def test_benches_of_the_check_are_of_the_sizes_that_it_names(tmp_path):
    """Their arguments are valid, and the models have 124M and 1B parameters."""
    _, page = check(tmp_path)
    sizes = []
    for name, *words in benches(page):
        own = [word for word in words if word.partition("=")[0] in command_line.Measuring.__dataclass_fields__]
        command_line.reject_unread(name, [word.partition("=")[0] for word in words])
        base = dict(word.split("=") for word in own).get("preset", "shakespeare_cpu")
        overrides = parse_overrides([word for word in words if word not in own], Config)
        settings = PRESETS[base]().replace(**overrides)
        layer = 12 * settings.model.d_model**2
        sizes.append(settings.model.layers * layer + settings.model.vocab * settings.model.d_model)
    kernel, small, large = sizes
    assert kernel < 1e7
    assert 0.12e9 < small < 0.13e9
    assert 0.9e9 < large < 1.1e9
