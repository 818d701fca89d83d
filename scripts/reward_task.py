"""Trains GRPO on a digit task, the larger of two digits, and fails unless every seed reaches the reward in the budget.

python scripts/reward_task.py [FOLDER]
"""

import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

SEEDS, STEPS, WANTED = (0, 1, 2), 500, 0.95
KEYS = (
    "tokenizer=chars seq=8 objective=grpo reward=match answer_tokens=1 batch=128 group_size=8 beta=0.02 lr=3e-3 "
    f"steps={STEPS} eval_every=100 log_every=50"
).split()


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    draw, data = random.Random(0), folder / "digits.jsonl"
    digits = [(draw.randrange(10), draw.randrange(10)) for _ in range(1000)]
    records = [{"prompt": f"{a} {b} ", "completion": str(max(a, b))} for a, b in digits]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    reached = []
    for seed in SEEDS:
        out = folder / f"seed{seed}"
        command = [sys.executable, "-m", "shardformer", "train", "tiny", *KEYS]
        subprocess.run([*command, f"data={data}", f"seed={seed}", f"out={out}"], check=True)
        with open(out / "metrics.csv", newline="") as file:
            best = max(-float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"])
        reached.append(best >= WANTED)
        print(f"seed {seed}: the mean reward of greedy answers to new prompts reached {best:.3f}, wanted {WANTED}")
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
