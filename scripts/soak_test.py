"""Trains `tiny` for many steps, with many evaluations and saves, and checks that the process does not grow.

    python scripts/soak_test.py [steps=10000] [times=300] [mesh=4x2] [out=FOLDER]

`times` is the number of evaluations and of saves. While the run trains, its resident memory, open descriptors and
threads are read every second into FOLDER/process.csv. The exit status is 1 in three cases:

- In the last quarter, memory grows by more than its noise and 20 bytes a step. Before, malloc's arenas grow.
- In the last quarter, descriptors or threads grow.
- The seconds of goodput.csv differ by over 1% from the wall time between the start of the process and the last row.
"""

import contextlib
import csv
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shardformer.config import parsing
from shardformer.errors import UsageError

SECONDS = 1.0  # between two readings
LEAST = 0.02  # kB a step: 50 kB in the last quarter of 10,000 steps, of pages of 4 kB
COLUMNS = ("seconds", "step", "resident_kb", "descriptors", "threads")


@dataclasses.dataclass(frozen=True)
class Options:
    steps: int = 10_000
    times: int = 300
    mesh: str = "4x2"
    out: str = ""  # an existing folder; empty means a temporary one

    def __post_init__(self):
        if self.times < 1 or self.steps < 10 * self.times:
            raise UsageError(f"times must be at least 1 and steps 10 times as many, got {self.times} and {self.steps}")
        if self.out and not Path(self.out).is_dir():
            raise UsageError(f"out={self.out} is not a folder")


def main(words: list[str]) -> int:
    try:
        options = parsing.parse_options(words, Options)
    except UsageError as error:
        print(f"soak_test: error: {error}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        folder = Path(options.out or stack.enter_context(tempfile.TemporaryDirectory()))
        began = time.time()
        readings = watch(train(options, folder), folder)
        problems = [*find_growth(readings), *find_lost_time(folder / "run", began)]
    print("\n".join(problems) or "sound")
    return bool(problems)


def train(options: Options, folder: Path) -> subprocess.Popen:
    every = options.steps // options.times
    words = ["tiny", f"mesh={options.mesh}", f"steps={options.steps}", "log_every=1", f"eval_every={every}",
             f"save_every={every}", "eval_batches=1", "keep=2", f"out={folder / 'run'}"]  # fmt: skip
    command = [sys.executable, "-m", "shardformer", "train", *words]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(command, env={"JAX_PLATFORMS": "cpu"} | os.environ, stdout=log, stderr=log)


def watch(process: subprocess.Popen, folder: Path) -> np.ndarray:
    """Reads the process until it ends; returns the readings [N, columns]."""
    began, readings = time.monotonic(), []
    with (folder / "process.csv").open("w") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        while process.poll() is None:
            with contextlib.suppress(OSError, KeyError):  # the process ends while it is read
                readings.append((round(time.monotonic() - began, 1), read_step(folder / "run"), *read(process.pid)))
                lines.writerow(readings[-1])
                file.flush()
            time.sleep(SECONDS)
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}:\n{(folder / 'log.txt').read_text()}")
    return np.array(readings)


def read(pid: int) -> tuple[int, int, int]:
    """Reads resident kilobytes, open descriptors and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def read_step(run: Path) -> int:
    """Reads the last complete step of metrics.csv."""
    try:
        with (run / "metrics.csv").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            return int(file.read().split(b"\n")[-2].split(b",")[0])
    except (OSError, IndexError, ValueError):
        return 0


def find_growth(readings: np.ndarray) -> list[str]:
    """Returns what grows in the last quarter of the steps."""
    # At the last step, the process also evaluates and writes a text.
    trained = readings[(readings[:, 1] > 0) & (readings[:, 1] < readings[-1, 1])]
    step = trained[:, 1]
    for begin in range(4):
        part = trained[(step >= begin / 4 * step[-1]) & (step <= (begin + 1) / 4 * step[-1])]
        _, _, resident, descriptors, threads = part.max(0)
        growth = f"{fit(part)[0] * 1000:+8.1f} kB in 1,000 steps"
        print(f"quarter {begin + 1}: {growth}, {resident:.0f} kB, {descriptors:.0f} descriptors, {threads:.0f} threads")
    slope, noise = fit(trained[step >= 3 / 4 * step[-1]])
    print(f"last quarter: {slope * 1000:+.1f} kB in 1,000 steps, noise {noise * 1000:.1f}")
    problems = [f"memory grows by {slope:.3f} kB a step"] if slope > 3 * noise + LEAST else []
    before, last = trained[(step >= step[-1] / 4) & (step < 3 / 4 * step[-1])], trained[step >= 3 / 4 * step[-1]]
    for column in (3, 4):
        if last[:, column].max() > before[:, column].max():
            problems.append(f"{COLUMNS[column]} grow to {last[:, column].max():.0f}")
    return problems


def fit(readings: np.ndarray) -> tuple[float, float]:
    """Returns the slope of memory in kB a step, and its standard error by the means of ten blocks.

    The slope is the median of those of all pairs of readings: one jump of malloc's is no growth.
    """
    first, second = np.triu_indices(len(readings), 1)
    steps, growths = (readings[second, column] - readings[first, column] for column in (1, 2))
    slope = float(np.median(growths[steps > 0] / steps[steps > 0]))
    means = np.array([block[:, 1:3].mean(0) for block in np.array_split(readings, 10)])
    rest = means[:, 1] - np.polyval(np.polyfit(*means.T, 1), means[:, 0])
    spread = ((means[:, 0] - means[:, 0].mean()) ** 2).sum()
    return slope, float(np.sqrt((rest**2).sum() / (len(means) - 2) / spread))


def find_lost_time(run: Path, began: float) -> list[str]:
    """Returns whether the kinds of goodput.csv do not sum to the wall time from `began` to its last row."""
    with (run / "goodput.csv").open() as file:
        *_, last = csv.DictReader(file)
    total = sum(float(value) for name, value in last.items() if name.endswith("_s"))
    wall = float(last["time"]) - began
    print(f"goodput.csv {total:.1f} s, its wall time {wall:.1f} s")
    return [] if abs(total - wall) <= 0.01 * wall else [f"goodput.csv has {total:.1f} of {wall:.1f} s"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
