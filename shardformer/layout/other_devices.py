"""The mesh of a resumed run on more or fewer devices than before."""

import contextlib

from shardformer.config import Config
from shardformer.config.parsing import parse_mesh
from shardformer.errors import UsageError
from shardformer.messages import log
from shardformer.tables import format_count


def adapt_to_devices(config: Config, devices: int, all_of_them: bool) -> Config:
    """Adapts the mesh of a resumed run to fewer or more devices: changes dp if that fits, else sets mesh=auto."""
    before, size = parse_mesh(config.parallel.mesh), config.parallel.devices
    per_replica = size // before.dp
    if devices == size or (devices % size == 0 and not all_of_them):
        return config
    changed = config.replace(mesh="auto")
    if devices % per_replica == 0:
        with contextlib.suppress(UsageError):
            changed = config.replace(mesh=str(before._replace(dp=devices // per_replica)))
    hint = "" if config.training.accum == 0 else "; accum=auto would adapt the microbatches"
    log.info(
        f"{format_count(size, 'device')} before, {devices} now: mesh={config.parallel.mesh} becomes "
        f"mesh={changed.parallel.mesh}, batch={config.training.batch} stays{hint}"
    )
    return changed
