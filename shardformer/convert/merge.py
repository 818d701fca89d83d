"""`convert RUN DST merge_lora=true`: a run with adapters as one whose weights have taken them up."""

import dataclasses

from shardformer import lora
from shardformer.convert import runs
from shardformer.convert.gptj_state import State
from shardformer.errors import UsageError
from shardformer.training.run_folder import Run


@dataclasses.dataclass(frozen=True)
class Merging:
    """The options of a conversion that merges adapters."""

    merge_lora: bool = True
    step: int = 0  # of the checkpoint; 0 means the best by validation
    ema: bool = False  # the average of the adapters, of a run that was trained with ema


def wanted(words: list[str]) -> bool:
    return any(word.partition("=")[0] == "merge_lora" for word in words)


def merged(run: Run, options: Merging) -> tuple[Run, State]:
    """The run without adapters, and its one state."""
    if not options.merge_lora:
        raise UsageError("merge_lora=false asks for nothing; leave it out, or say merge_lora=true")
    if not run.config.lora_rank:
        raise UsageError(f"{run.out} was trained with lora_rank={run.config.lora_rank}: it has no adapters to merge")
    found = runs.read(run, options.step, with_moments=False, averaged=options.ema)
    nested = {}
    for name, leaf in found.params.items():
        module, _, own = name.rpartition("/")
        nested.setdefault(module, {})[own] = leaf
    params = runs.flat({module: lora.merge_adapters(leaves, run.config) for module, leaves in nested.items()})
    settings = run.config.replace(lora_rank=0, base="", ema=0.0, lr_rules="")
    return dataclasses.replace(run, config=settings), State(found.step, params)
