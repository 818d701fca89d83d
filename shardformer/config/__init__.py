"""The configuration of a run: groups of keys, each with its rules, presets and names. Nothing here imports JAX."""

from shardformer.config.config import (
    ARCHITECTURE,
    BATCHES,
    FIELDS,
    FIXED_ON_RESUME,
    LAUNCH_ONLY_KEYS,
    SECTIONS,
    STATE_LAYOUT,
    Config,
    is_hugging_face,
    override_on_resume,
    parse_config,
)
from shardformer.config.presets import PRESETS, preset

__all__ = [
    "ARCHITECTURE",
    "BATCHES",
    "FIELDS",
    "FIXED_ON_RESUME",
    "LAUNCH_ONLY_KEYS",
    "PRESETS",
    "SECTIONS",
    "STATE_LAYOUT",
    "Config",
    "is_hugging_face",
    "override_on_resume",
    "parse_config",
    "preset",
]
