"""The configuration of a run: groups of keys, each with its rules, presets and names. Nothing here imports JAX."""

from shardformer.config.config import (
    ARCHITECTURE,
    FIELDS,
    FIXED_ON_RESUME,
    GROUPS,
    LAUNCH_ONLY_KEYS,
    Config,
    is_hugging_face,
    key_names,
    override_on_resume,
    parse_config,
)
from shardformer.config.data_keys import check_tokenizer
from shardformer.config.key_rules import check_given, check_zero
from shardformer.config.keys import format_value, key, require
from shardformer.config.presets import PRESETS, preset
from shardformer.config.run_keys import RunKeys, is_address

__all__ = [
    "ARCHITECTURE",
    "FIELDS",
    "FIXED_ON_RESUME",
    "GROUPS",
    "LAUNCH_ONLY_KEYS",
    "PRESETS",
    "Config",
    "RunKeys",
    "check_given",
    "check_tokenizer",
    "check_zero",
    "format_value",
    "is_address",
    "is_hugging_face",
    "key",
    "key_names",
    "override_on_resume",
    "parse_config",
    "preset",
    "require",
]
