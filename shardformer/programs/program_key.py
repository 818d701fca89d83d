"""The key of a compiled program: a hash of everything that the compiler's result depends on."""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib
from jax.extend import backend

from shardformer.programs.processor import describe_processor

# Settings of JAX with these beginnings change no program, or change its text as well.
_IRRELEVANT = ("jax_compilation_cache", "jax_persistent_cache", "jax_numpy", "jax_num_cpu_devices", "jax_platforms")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PLACE = ("id", "process_index", "device_kind", "coords", "core_on_chip", "slice_index")


def make_key(text: str, devices: Sequence[jax.Device], options: Any = None) -> str:
    """Returns the key of a lowered program, on `devices` in the order of its mesh, with these compiler options.

    The text has no locations and no device order: programs of two orders differ only in `devices`.
    """
    order = [[str(getattr(device, name, "")) for name in _PLACE] for device in devices]
    parts = [text, order, repr(options), jax.process_index(), jax.process_count(), _describe_compiler()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _describe_compiler() -> list:
    settings: Any = jax.config  # a type checker does not know its values
    platform = backend.get_backend()
    versions = [jax.__version__, jaxlib.__version__, platform.platform, platform.platform_version]
    flags = [os.environ.get(name, "") for name in _FLAGS]
    values = sorted((name, repr(value)) for name, value in settings.values.items() if not name.startswith(_IRRELEVANT))
    return [versions, describe_processor(), flags, values]
