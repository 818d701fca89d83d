"""Rewards from a verifier: GRPO samples answers, and a function of yours says which of them are right.

    python scripts/examples/verifier.py

A prompt such as "2 7 " asks for a digit between the two. Often two or more digits are right, so there is no one answer
to imitate; the verifier below checks what the model wrote. At first one answer in three is right, at the end four in
five are.
"""

import csv
import itertools
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

OUT, TASKS = "checkpoints/between", Path("checkpoints/between.jsonl")


def is_between(prompt: str, answer: str, expected: str) -> float:
    """Returns 1 for a digit between those of the prompt, else 0. It needs no expected answer."""
    low, high = sorted(map(int, prompt.split()))
    return float(answer.strip().isdigit() and low < int(answer) < high)


def write_tasks() -> None:
    pairs = [(a, b) for a, b in itertools.product(range(10), repeat=2) if abs(a - b) > 1]
    records = [{"prompt": f"{a} {b} ", "completion": str((a + b) // 2)} for a, b in pairs]
    TASKS.parent.mkdir(exist_ok=True)
    TASKS.write_text("".join(json.dumps(record) + "\n" for record in records))


def shardformer(command: str) -> None:
    print(f"$ python -m shardformer {command}", flush=True)
    subprocess.run([sys.executable, "-m", "shardformer", *shlex.split(command)], check=True)


def main(steps: int = 150) -> tuple[float, float]:
    write_tasks()
    shutil.rmtree(OUT, ignore_errors=True)  # of an earlier start
    shardformer(
        f"train tiny data={TASKS} tokenizer=chars seq=8 objective=grpo reward={__file__}:is_between answer_tokens=1 "
        f"batch=64 group_size=8 lr=5e-3 mesh=2x1 steps={steps} eval_every=50 out={OUT}"
    )
    with open(f"{OUT}/metrics.csv", newline="") as file:
        rewards = [float(row["reward"]) for row in csv.DictReader(file) if row["reward"]]
    few = max(len(rewards) // 16, 1)
    first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
    print(f"right answers: {first:.0%} of the samples in the first {few} steps, {last:.0%} in the last {few}")
    return first, last


if __name__ == "__main__":
    main()
