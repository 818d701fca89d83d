"""`python -m shardformer.bench.compiled_schedule [NAME ...]`: steps of large models by a TPU compiler's schedule.

Compiles each row of `ROWS` with libtpu (the extra `aot`), and prints it as analysis/wire_time.py times it. No TPU is
used. A row takes minutes and 2 GB of memory.
"""

import sys

from shardformer.analysis import compiling, wire_time
from shardformer.analysis.compiling import CompiledStep
from shardformer.config import Config, parsing
from shardformer.config.presets import preset
from shardformer.devices.chips import Slice, parse_slice
from shardformer.errors import UsageError

DENSE = "tiny block=sequential dtype=bfloat16"
SPLIT = "mesh=16x1 zero=3 remat=dots grad_dtype=bfloat16"
LEARNED = "vocab=50304 positions=learned bias=none tied=true"
LLAMA = "layers=32 d_model=4096 heads=32 d_ff=11008 vocab=32000 norm=rmsnorm bias=none activation=swiglu"
ROWS = {
    "v5e": ("v5e:4x4", "gptj_6b mesh=16x1 grad_dtype=bfloat16"),
    "v4": ("v4:2x2x4", "gptj_6b mesh=16x1 batch=64 grad_dtype=bfloat16"),
    "v5p": ("v5p:4x4x4", "gptj_6b mesh=64x1 batch=1024 grad_dtype=bfloat16"),
    "7B": ("v5e:4x4", f"{DENSE} {LLAMA} {SPLIT} seq=2048 batch=16"),
    "1.3B": ("v5e:4x4", f"{DENSE} {LEARNED} {SPLIT} layers=24 d_model=2048 heads=32 seq=2048 batch=32"),
    "125M": ("v5e:2x2", f"{DENSE} {LEARNED} mesh=4x1 layers=12 d_model=768 heads=12 seq=1024 batch=32"),
    "8B": ("v5p:4x4x4", "llama3_8b mesh=64x1 batch=192 remat=dots grad_dtype=bfloat16"),
    "QLoRA": ("v5e:1x1", "gptj_6b mesh=1x1 batch=2 zero=0 weights=nf4 lora_rank=8"),
}  # fmt: skip
HEADER = "| row | GB | M cycles | ms of cycles, kernels, exposed wire | MFU |\n|---|---|---|---|---|"


def main(names: list[str]) -> None:
    """Prints a table of the named rows, by default of all."""
    if wrong := [name for name in names if name not in ROWS]:
        raise UsageError(f"bench.compiled_schedule takes {', '.join(ROWS)}, got {', '.join(wrong)}")
    print(HEADER)
    for name in names or ROWS:
        chip, arguments = ROWS[name]
        chips, config = parse_slice(chip), read_config(arguments)
        step = compiling.compile_step(config, compiling.tpu_mesh(config, chips), "libtpu", chips)
        print(format_row(f"{name}, {chip}", step, config, chips), flush=True)


def read_config(arguments: str) -> Config:
    """Returns the configuration of 'PRESET key=value ...'."""
    name, *overrides = arguments.split()
    return preset(name).override(parsing.parse_overrides(overrides, Config))


def format_row(name: str, step: CompiledStep, config: Config, chips: Slice) -> str:
    """Returns a line of the table: figures of one device, or why there are none."""
    if step.refused:
        return f"| {name} | {step.refused} | | | |"
    gigabytes, times = f"{step.bytes / 1e9:.2f}", step.timeline
    if times is None:
        return f"| {name} | {gigabytes} | not printed by this libtpu | | |"
    parts = " + ".join(f"{1e3 * seconds:.0f}" for seconds in (times.computing, times.kernels, times.exposed))
    share = wire_time.utilization(times, config, chips)
    return f"| {name} | {gigabytes} | {step.cycles / 1e6:.0f} | {parts} | {share:.1%} |"


if __name__ == "__main__":
    main(sys.argv[1:])
