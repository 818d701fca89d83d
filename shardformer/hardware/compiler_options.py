"""Options of XLA's compiler for a train step, by chip, each with the gain that the compiler's schedule shows.

`gptj_6b` with `grad_dtype=bfloat16`, libtpu 0.0.52, by `plan`; analysis/wire_time.py has the method.
"""

from jax.sharding import AbstractMesh, Mesh

from shardformer.hardware.chips import CHIPS, find_chip

OPTIONS = {
    # Gathers of parameters start early, as on a v5e without an option: 70 ms less exposed on v4:2x2x4.
    "v4": {"xla_enable_async_all_gather": "true"},
}


def find_options(device_mesh: Mesh | AbstractMesh) -> dict[str, str] | None:
    """Returns the options for a program of these devices; None for chips without a line in the table."""
    if isinstance(device_mesh, AbstractMesh):
        return None
    device = device_mesh.devices.flat[0]
    chip = find_chip(device.device_kind) if device.platform == "tpu" else None
    return next((options for name, options in OPTIONS.items() if CHIPS[name] is chip), None)
