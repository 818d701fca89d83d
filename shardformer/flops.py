"""The arithmetic of a train step, and how much of a chip's peak it takes (MFU)."""

from shardformer import specs
from shardformer.chips import Chip
from shardformer.config import Config
from shardformer.model import Model


def flops_per_token(config: Config) -> int:
    """Of a train step: 6 for each parameter that multiplies an activation, and the causal half of attention.

    Embedding tables do not multiply, a tied head does; recomputation (remat) is not work that was asked for.
    """
    shapes = Model.abstract_parameters(config)
    multiplying = specs.count_parameters(shapes) - specs.count_parameters(shapes["transformer/embed"])
    if config.tied:
        multiplying += config.padded_vocab * config.d_model
    return 6 * multiplying + 6 * config.layers * config.seq * config.d_model


def peak_tokens_per_second(config: Config, chip: Chip) -> float:
    """What the chips of the config's mesh would do if they did nothing but this model's arithmetic: MFU 1."""
    return config.devices * chip.flops / flops_per_token(config)


def describe_peak(config: Config, chip: Chip) -> str:
    """In one line: what a run's MFU is measured against."""
    return (
        f"{flops_per_token(config) / 1e9:,.4g} GFLOP a token; MFU 1 would be "
        f"{peak_tokens_per_second(config, chip):,.0f} tokens/s, at {chip.flops / 1e12:,.0f} TFLOP/s in bfloat16 "
        f"on each device ({chip.source})"
    )
