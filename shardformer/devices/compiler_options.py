"""Options of XLA's compiler for a train step, by chip, each with the gain that the compiler's schedule shows.

`gptj_6b` with `grad_dtype=bfloat16`, libtpu 0.0.52, by `plan`; analysis/wire_time.py has the method.
"""

from jax.sharding import AbstractMesh, Mesh

from shardformer.devices.chips import CHIPS, find_chip

# Exchanges of gradients (parallel/scattering.py) overlap with matmuls: 121 ms less exposed on v5e:4x4. libtpu
# refuses it for larger slices of v5e.
EXCHANGING = {"xla_tpu_enable_async_all_to_all": "true"}
OPTIONS = {
    # A fusion may take twice as much fast memory, so that XLA finds better tiles: 22 ms of cycles and 12 ms of exposed
    # wire less on v5e:4x4.
    "v5e": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
    # For the same reason: 296 ms of cycles less on v5p:4x4x4, of 2,226 in all (libtpu 0.0.42.1, 8 rows a chip).
    "v5p": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
    # Gathers of parameters start early, as on a v5e without an option: 70 ms less exposed on v4:2x2x4.
    "v4": {"xla_enable_async_all_gather": "true"},
}


def find_options(device_mesh: Mesh | AbstractMesh) -> dict[str, str] | None:
    """Returns the options for a program of these devices; None if they are no TPUs."""
    if isinstance(device_mesh, AbstractMesh):
        return None
    device = device_mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    chip = find_chip(device.device_kind)
    exchanging = EXCHANGING if not chip or device_mesh.size <= (chip.exchanging or device_mesh.size) else {}
    return exchanging | next((options for name, options in OPTIONS.items() if CHIPS[name] is chip), {})
