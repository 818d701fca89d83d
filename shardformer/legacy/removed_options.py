"""Options that `jax.config` no longer has: they are set and read, and mean nothing; setting one warns, once."""

import contextlib
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax

# Each option's value where legacy code reads it: what JAX does today, or what the option was by default.
REMOVED_OPTIONS: dict[str, Any] = {
    "experimental_xmap_ensure_fixed_sharding": False,
    "experimental_xmap_spmd_lowering": True,
    "experimental_xmap_spmd_lowering_manual": False,
    "jax_array": True,
    "jax_backend_target": "",
    "jax_coordination_service": True,
    "jax_cpu_enable_gloo_collectives": True,
    "jax_custom_vjp_disable_shape_check": False,
    "jax_default_dtype_bits": "64",
    "jax_dynamic_shapes": False,
    "jax_eager_pmap": True,
    "jax_enable_custom_vjp_by_custom_transpose": False,
    "jax_enable_memories": True,
    "jax_enable_mlir": True,
    "jax_experimental_name_stack": True,
    "jax_experimental_subjaxpr_lowering_cache": True,
    "jax_host_callback_ad_transforms": False,
    "jax_host_callback_inline": False,
    "jax_host_callback_legacy": False,
    "jax_host_callback_max_queue_byte_size": int(256 * 1e6),
    "jax_host_callback_outfeed": False,
    "jax_jit_pjit_api_merge": True,
    "jax_new_checkpoint": True,
    "jax_omnistaging": True,
    "jax_parallel_functions_output_gda": False,
    "jax_pmap_no_rank_reduction": True,
    "jax_pmap_shmap_merge": True,
    "jax_remat_opt_barrier": True,
    "jax_share_autotune_config_between_hosts": False,
    "jax_spmd_mode": "allow_jit",
    "jax_unsafe_xla_runtime_errors": False,
    "jax_xla_backend": "",
    "mock_num_gpus": 1,
    "omnistaging_enabled": True,
    "use_mock_gpu_client": False,
}

# JAX still has this one, where a backend of that time ("xla", "tpu_driver") now is a platform that does not exist.
CHANGED = {"jax_xla_backend"}


class _Flags:
    """`jax.config.FLAGS`: the options as attributes."""

    def __getattr__(self, name: str):
        return _read(name)

    def __setattr__(self, name: str, value):
        jax.config.update(name, value)


FLAGS = _Flags()
flags = types.SimpleNamespace(FLAGS=FLAGS)


def enable_omnistaging() -> None:
    _ignored("omnistaging_enabled")


def put_back(stack: contextlib.ExitStack) -> None:
    """Makes `jax.config` take the removed options, until `stack` closes."""
    known = jax.config.values
    missing = {name: value for name, value in REMOVED_OPTIONS.items() if name not in known or name in CHANGED}
    _set(stack, "update", _ignoring(missing, jax.config.update))
    _set(stack, "read", lambda name: missing[name] if name in missing else _today_read(name))
    _set(stack, "enable_omnistaging", enable_omnistaging)
    for name, value in {**missing, "FLAGS": FLAGS, "flags": flags}.items():
        if not hasattr(jax.config, name):
            _set(stack, name, value)


_today_read = jax.config.read


def _set(stack: contextlib.ExitStack, name: str, value: Any) -> None:
    stack.callback(delattr, jax.config, name)
    setattr(jax.config, name, value)


def _ignoring(missing: dict[str, Any], update: Callable) -> Callable:
    @functools.wraps(update)
    def update_or_ignore(name: str, val: Any) -> None:
        if name in missing:
            _ignored(name)
            missing[name] = val
            setattr(jax.config, name, val)
        else:
            update(name, val)

    return update_or_ignore


def _read(name: str) -> Any:
    return getattr(jax.config, name)


@functools.cache
def _ignored(name: str) -> None:
    warnings.warn(f"jax.config has no option {name} any more: setting it does nothing; delete the line", stacklevel=3)
