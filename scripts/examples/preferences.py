"""Preferences: a model learns by DPO to prefer the better one of two answers.

    python scripts/examples/preferences.py

A small model first learns to write plays. Then it sees pairs: after any name, "I thank you." is better than
"Away!". The share of pairs that it has in the right order is printed, on names that it has not seen, and a sample.
"""

import csv
import itertools
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

BASE, TUNED, PAIRS = "checkpoints/example", "checkpoints/polite", Path("checkpoints/pairs.jsonl")


def shardformer(command: str) -> None:
    print(f"$ python -m shardformer {command}", flush=True)
    subprocess.run([sys.executable, "-m", "shardformer", *shlex.split(command)], check=True)


def write_pairs() -> None:
    """Writes a record a line: a prompt, and the chosen and the rejected answer."""
    names = [
        f"{first}{rest}" for first, rest in itertools.product("BFHJKMOQTUVXYZ", ("an", "enn", "obin", "ory", "el"))
    ]
    records = [{"prompt": f"{name}: ", "chosen": "I thank you.", "rejected": "Away!"} for name in names]
    PAIRS.parent.mkdir(exist_ok=True)
    PAIRS.write_text("".join(json.dumps(record) + "\n" for record in records))


def main(steps: int = 120) -> list[float]:
    if not Path(BASE, "final.json").exists():  # which the end of its training writes
        shutil.rmtree(BASE, ignore_errors=True)
        shardformer(f"train tiny data=builtin seq=32 steps=100 out={BASE}")
    write_pairs()
    shutil.rmtree(TUNED, ignore_errors=True)  # of an earlier start
    shardformer(f"train base={BASE} data={PAIRS} objective=dpo beta=0.1 lr=3e-3 sft_weight=1 steps={steps} out={TUNED}")
    shardformer(f"sample {TUNED} prompt='Tamsin: ' temperature=0 tokens=12")
    with open(f"{TUNED}/metrics.csv", newline="") as file:
        shares = [float(row["val_accuracy"]) for row in csv.DictReader(file) if row["val_accuracy"]]
    print(f"right order on new names: {shares[-1]:.0%} of the pairs")
    return shares


if __name__ == "__main__":
    main()
