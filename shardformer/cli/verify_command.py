"""`verify`: sharded against dense, on the devices of this machine."""

from shardformer.analysis import verify
from shardformer.cli.arguments import parse_settings, say
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh


def run_verify(arguments: list[str]) -> int:
    """Compares a sharded with a dense model; returns 1 if they differ."""
    settings = parse_settings(arguments)
    settings = mesh.start(settings, say=say)
    if settings.parallel.devices == 1:
        raise UsageError("mesh=1x1 is the dense model itself; give a mesh of several devices, such as mesh=4x2")
    kind = mesh.find_devices()[0].device_kind
    say(
        f"mesh {settings.parallel.mesh} ({settings.parallel.mesh_axes}) of {kind} devices against a plain dense "
        "model, in float32"
    )
    try:
        rows = verify.verify_config(settings)
    except (ValueError, TypeError) as error:  # raised by JAX and Haiku for impossible slices and sums
        raise RunError(f"the sharded model cannot be traced: {' '.join(str(error).split())[:500]}") from None
    say(verify.format_differences(rows))
    return 0 if all(row.passes for row in rows) else 1
