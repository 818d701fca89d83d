"""`depth=N` in place of a preset: one number from which the sizes, the batch, the steps and the rate follow."""

import dataclasses
import math
from typing import NamedTuple

from shardformer.config.config import FIELDS, Config
from shardformer.config.keys import KeyGroup, check_value, key, largest_divisor, require
from shardformer.errors import UsageError
from shardformer.tables import format_count

WIDTH_OF_A_LAYER = 32
HEAD = 32
TOKENS_OF_A_PARAMETER = 8
TUNED_TOKENS, TUNED_BATCH = 6_291_456, 8192  # of depth=4
LEADING = ("layers", "d_model", "seq", "batch", "steps", "eval_every", "optimizer")  # from which other keys follow
RATES = {"normuon": 1e-2, "muon": 1e-2, "adamw": 3e-3}  # tuned at 128 x 4 by `bench race recipe=`
LARGEST_ON_A_CPU = 6  # layers; they train for hours there


@dataclasses.dataclass(frozen=True)
class DepthKeys(KeyGroup):
    """In place of a preset"""

    depth: int = key(
        4, "layers, from which width, heads, seq, batch, steps and rate follow; other keys replace what it chooses",
        least=1, below=257,
    )  # fmt: skip


class Choice(NamedTuple):
    """A value that `depth` gives to a key, and why."""

    key: str
    value: object
    reason: str


def choose_by_depth(depth: int, given: dict) -> list[Choice]:
    """Returns the keys that `depth` chooses, but those that are given, from which the others then follow."""
    for name in given.keys() & set(LEADING):
        check_value(FIELDS[name], given[name])
    optimizer = given.get("optimizer", "normuon")
    if optimizer not in RATES:
        raise UsageError(f"depth={depth} knows rates of {', '.join(RATES)}, got optimizer={optimizer}; name a preset")
    layers = given.get("layers", depth)
    width = given.get("d_model", WIDTH_OF_A_LAYER * layers)
    seq = given.get("seq", max(1 << (width - 1).bit_length(), 64))
    parameters = 12 * layers * width**2
    tokens = TOKENS_OF_A_PARAMETER * parameters
    rows = TUNED_BATCH * (tokens / TUNED_TOKENS) ** 0.383 / seq
    batch = given.get("batch", max(1 << round(math.log2(max(rows, 1))), 8))
    steps = given.get("steps", max(round(tokens / (batch * seq)), 1))
    heads = largest_divisor(width, at_most=max(width // HEAD, 1))
    evaluated = given.get("eval_every", max(steps // 10, 1))
    share = f"{TOKENS_OF_A_PARAMETER} tokens for each of the {parameters / 1e6:.1f}M parameters of the layers"
    choices = [
        Choice("layers", layers, "the depth"),
        Choice("d_model", width, f"{WIDTH_OF_A_LAYER} a layer: narrow, so that a few layers train on a CPU"),
        Choice("heads", heads, f"heads of {width // heads}: of {HEAD} if they divide the width, for any depth"),
        Choice("seq", seq, "a power of two from the width on: attention takes a seventh to a quarter of the products"),
        Choice(
            "batch", batch, f"{batch * seq:,} tokens; {TUNED_BATCH:,} for depth=4, by the power 0.383 of all tokens"
        ),
        Choice("steps", steps, f"{share}, as nanochat's 8 to 12"),
        Choice("optimizer", optimizer, "a third of AdamW's steps to the same loss (bench race recipe=best)"),
        Choice("lr", RATES[optimizer], f"the best of {optimizer} at 128 x 4"),
        Choice("scale", "completep:128x4", "carries this rate over to other sizes"),
        Choice("schedule", "linear", "to zero at the last step, as the best recipe"),
        Choice("warmup", max(steps // 100, 1), "a hundredth of the steps"),
        Choice("eval_every", evaluated, f"{format_count(steps // evaluated, 'time')} in the run"),
        Choice("eval_batches", max(evaluated // 10, 1), "a tenth of the steps in between"),
        Choice("save_every", evaluated, "where it is evaluated"),
        Choice(
            "dtype",
            "bfloat16" if layers > LARGEST_ON_A_CPU else "float32",
            "float32 for a CPU, which up to 6 layers suit; bfloat16 for accelerators",
        ),
    ]
    if layers <= LARGEST_ON_A_CPU:
        choices.append(Choice("scan", False, "for a CPU, which runs layers faster unrolled; a few compile quickly"))
    return [choice for choice in choices if choice.key not in given]


def at_depth(depth: int, given: dict) -> Config:
    """Returns the configuration of `depth=N key=value ...`, whose keys no longer know of the depth."""
    require(not given.get("epochs"), f"depth={depth} chooses the steps; leave epochs out, or name a preset")
    chosen = {choice.key: choice.value for choice in choose_by_depth(depth, given)}
    base = Config.of(
        block="sequential", bias="none", tied=True, qk_norm="head", activation="relu2", init_std=None, lr_min=0.0,
        momentum=0.9, out=f"checkpoints/depth_{depth}",
    )  # fmt: skip
    return base.replace(**(chosen | given)).override(given)  # together, as rules compare chosen keys with given ones
