"""The vocabulary and the shapes that a new run takes from its base, and bases that it cannot start from."""

from shardformer.config import ARCHITECTURE, Config
from shardformer.errors import UsageError


def reads_shorter_rows(config: Config, base: Config) -> bool:
    """Returns whether rows are shorter than the base's, and no parameter of it is a table of positions."""
    return config.model.seq < base.model.seq and base.model.positions != "learned"


def take_vocab_of_base(config: Config, base: Config) -> Config:
    """Returns the configuration with its base's vocabulary; raises if the base's weights would not fit."""
    if base.lora.lora_rank:
        raise UsageError(
            f"base={config.training.base} has adapters; merge them first: convert {config.training.base} MERGED "
            "merge_lora=true"
        )
    check_trained(config, base)
    if config.model.vocab not in (0, base.model.vocab):
        raise UsageError(
            f"base={config.training.base} knows {base.model.vocab} tokens; give vocab={base.model.vocab}, got "
            f"vocab={config.model.vocab}"
        )
    fitted = config.replace(vocab=base.model.vocab)
    shorter = ("seq",) if reads_shorter_rows(fitted, base) else ()
    if other := [name for name in ARCHITECTURE if fitted.get(name) != base.get(name) and name not in shorter]:
        keys = " ".join(f"{name}={base.shown(name)}" for name in other)
        raise UsageError(f"base={config.training.base} is another model; give {keys}")
    return fitted


def check_trained(config: Config, base: Config) -> None:
    """Rejects a base that trained something else than a run with this configuration starts from."""
    if not base.objective.reads_tokens or (config.objective.has_vocabulary and not base.objective.has_vocabulary):
        same = f", or objective={base.objective.name}" if base.objective.reads_tokens else ""
        raise UsageError(
            f"base={config.training.base} trained {base.objective.trained}, which is no language model; give another "
            f"base{same}"
        )
