"""Kills a run that saves after every step, at random moments, and checks its checkpoints.

    python scripts/kill_test.py [kills=200] [seed=0] [steps=60] [out=FOLDER]

After each kill every visible checkpoint must verify and equal bitwise the uninterrupted run's at that step. A run that
reaches its last step must have the uninterrupted run's metrics, too. Exit status 1 if not.
"""

import contextlib
import csv
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardformer import checkpoint
from shardformer.config import parsing
from shardformer.errors import RunError, UsageError

SECONDS = 300  # the longest start on a busy machine
TIMINGS = {"tokens_per_s", "save_s", "elapsed_s"}


@dataclasses.dataclass(frozen=True)
class Options:
    kills: int = 200
    seed: int = 0
    steps: int = 60
    out: str = ""  # an existing folder; empty means a temporary one

    def __post_init__(self):
        if self.kills < 1 or self.steps < 3:
            raise UsageError(f"kills must be at least 1 and steps at least 3, got {self.kills} and {self.steps}")
        if self.out and not Path(self.out).is_dir():
            raise UsageError(f"out={self.out} is not a folder")


def main(words: list[str]) -> int:
    try:
        options = parsing.parse_options(words, Options)
    except UsageError as error:
        print(f"kill_test: error: {error}", file=sys.stderr)
        return 2
    kills, steps, draw = options.kills, options.steps, random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        folder = Path(options.out or stack.enter_context(tempfile.TemporaryDirectory()))
        text = folder / "text.txt"
        text.write_text("To be, or not to be, that is the question.\n" * 200)
        whole = folder / "whole"
        finish(start(folder, "train", *settings(text, steps), "keep=1000000", f"out={whole}"))
        failures, rounds = [], 0
        for number in range(1, kills + 1):
            out = folder / f"run_{rounds}"
            resuming = (out / "config.json").exists()
            words = ("--resume", out) if resuming else (*settings(text, steps), "keep=3", f"out={out}")
            killed = kill(start(folder, "train", *words), out, steps, draw)
            left, seen = problems(out, whole), checkpoint.list_steps(out)
            if steps in seen:
                left += [] if rows(out) == rows(whole) else [f"{out}/metrics.csv is not the uninterrupted run's"]
                rounds += 1
            failures += left
            what = f"{'resumed' if resuming else 'new    '}  {'killed' if killed else 'ended'}"
            print(f"{number:4d}  {what}  checkpoints {seen}  {'; '.join(left) or 'sound'}", flush=True)
    print(f"{kills} kills, {rounds} runs came to their end, {len(failures)} failures")
    return bool(failures)


def settings(text: Path, steps: int) -> tuple:
    return ("tiny", "mesh=2x1", "layers=1", f"data={text}", f"steps={steps}", "save_every=1", "eval_every=7",
            "eval_batches=1", "dropout=0.1")  # fmt: skip


def start(folder: Path, *words) -> subprocess.Popen:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = cache | os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "shardformer", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=SECONDS)
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"a run ended with status {process.returncode}:\n{said}")
    return said


def kill(process: subprocess.Popen, out: Path, steps: int, draw: random.Random) -> bool:
    """Kills a run during its start, or after some further saves; returns False if it ended before."""
    starting, wait = draw.random() < 0.1, draw.uniform(0, 0.1)
    wanted = min(newest(out) + draw.randint(1, steps // 3), steps)
    deadline = time.monotonic() + (draw.uniform(0, 8) if starting else SECONDS)
    while process.poll() is None and newest(out) < wanted and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(wait)
    process.kill()
    finish(process)
    return process.returncode == -signal.SIGKILL


def newest(out: Path) -> int:
    return max(checkpoint.list_steps(out), default=0)


def problems(out: Path, whole: Path) -> list[str]:
    found = []
    for step in checkpoint.list_steps(out):
        folder = checkpoint.step_folder(out, step)
        try:
            checkpoint.verify(folder)
        except RunError as error:
            found.append(str(error))
        if (folder / "arrays.npy").read_bytes() != (checkpoint.step_folder(whole, step) / "arrays.npy").read_bytes():
            found.append(f"{folder} is not bitwise the uninterrupted run's")
    ahead = len(rows(out)) - newest(out)
    if not 0 <= ahead <= 3:  # at most the steps whose saves were under way
        found.append(f"{out} is {ahead} steps ahead of its newest checkpoint")
    return found


def rows(out: Path) -> list[dict]:
    """Returns the complete rows of metrics.csv without their timings."""
    try:
        lines = (out / "metrics.csv").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in csv.DictReader(lines)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
