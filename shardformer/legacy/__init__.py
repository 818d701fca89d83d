"""jax's deleted `xmap` and its neighbours, on today's JAX: GPT-J-era code runs unedited after `install()`."""

import importlib.util

if importlib.util.find_spec("jax") is not None:  # `legacy --check` runs without
    from shardformer.legacy.axis_resources import SerialLoop, serial_loop
    from shardformer.legacy.install import install, installed, uninstall
    from shardformer.legacy.mesh_in_scope import Mesh, ResourceEnv, mesh, thread_resources
    from shardformer.legacy.xmap import xmap

__all__ = [
    "Mesh",
    "ResourceEnv",
    "SerialLoop",
    "install",
    "installed",
    "mesh",
    "serial_loop",
    "thread_resources",
    "uninstall",
    "xmap",
]
