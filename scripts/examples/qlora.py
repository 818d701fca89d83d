"""QLoRA, then PEFT: adapters are trained over 4-bit weights, and written in the format that PEFT reads.

    python scripts/examples/qlora.py

The base's matrices are stored as nf4 codes and stay frozen; only two small factors beside each are trained. The folder
at the end has adapter_config.json and adapter_model.safetensors, for `peft.PeftModel.from_pretrained`.
"""

import csv
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

BASE, TUNED, PEFT = "checkpoints/gptj_like", "checkpoints/poem", "checkpoints/poem_peft"
TEXT = Path("checkpoints/poem.txt")
POEM = "The crow is in the corn.\nThe corn is in the crow.\nWho sows in the morn\nhas nothing to mow.\n\n"


def shardformer(command: str) -> None:
    print(f"$ python -m shardformer {command}", flush=True)
    subprocess.run([sys.executable, "-m", "shardformer", *shlex.split(command)], check=True)


def main(steps: int = 60) -> dict:
    if not Path(BASE, "final.json").exists():  # which the end of its training writes
        shutil.rmtree(BASE, ignore_errors=True)
        shardformer(f"train tiny data=builtin seq=32 steps=100 out={BASE}")
    TEXT.write_text(POEM * 100)
    for folder in (TUNED, PEFT):  # of an earlier start
        shutil.rmtree(folder, ignore_errors=True)
    shardformer(
        f"train base={BASE} weights=nf4 lora_rank=4 lora_targets=q,v data={TEXT} lr=1e-2 steps={steps} out={TUNED}"
    )
    shardformer(f"convert {TUNED} {PEFT} format=peft base_name=me/gptj_like")
    with open(f"{TUNED}/metrics.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    print(f"nats a character of the poem: {losses[0]:.2f} at first, {losses[-1]:.2f} at the end")
    settings = json.loads(Path(PEFT, "adapter_config.json").read_text())
    size = Path(PEFT, "adapter_model.safetensors").stat().st_size
    print(f"{PEFT}: {size:,} bytes, rank {settings['r']} on {', '.join(settings['target_modules'])}")
    return settings


if __name__ == "__main__":
    main()
