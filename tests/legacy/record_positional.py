"""Writes goldens/positional_sharding.json: `python tests/legacy/record_positional.py`, with jax 0.4.13 alone.

Recorded are the shape of each layout, and the first numbers and the shape of each device's part of an array.
"""

import json
import os
from pathlib import Path

LAYOUTS = {
    "base": (16,),
    "base.reshape(4, 2)": (8, 8),
    "base.reshape((2, 4))": (8, 8),
    "base.reshape(8, 1)": (8, 8),
    "base.reshape(4, 2).T": (8, 8),
    "base.reshape(4, 2).replicate(0)": (8, 8),
    "base.reshape(4, 2).replicate(axis=1, keepdims=True)": (8, 8),
    "base.reshape(4, 2).replicate()": (8, 8),
    "base.reshape(2, 4).replicate(-1)": (8, 8),
    "base.reshape(4, 2).replicate(0, keepdims=False)": (8,),
    "base.reshape(4, 2).replicate(1).reshape(2, 2)": (8, 8),
    "base.reshape(2, 2, 2).replicate(0).replicate(2)": (4, 4, 4),
    "base.reshape(2, 2, 2).transpose(2, 0, 1)": (4, 4, 4),
    "type(base)(devices[:6]).reshape(3, 2)": (6, 6),
    "type(base)(devices[:6]).reshape(3, 2).replicate(0)": (6, 6),
    "type(base)(devices[::-1]).reshape(2, 4)": (8, 8),
}


def placements(base) -> dict[str, list]:
    """Returns where each layout puts the parts of an array that counts."""
    import jax
    import numpy as np

    found = {}
    for layout, shape in LAYOUTS.items():
        sharding = eval(layout, {"base": base, "devices": jax.devices()})
        array = jax.device_put(np.arange(np.prod(shape)).reshape(shape), sharding)
        parts = [(shard.device.id, np.asarray(shard.data)) for shard in array.addressable_shards]
        parts.sort(key=lambda part: part[0])
        found[layout] = [list(sharding.shape), [[i, p.ravel()[:3].tolist(), list(p.shape)] for i, p in parts]]
    return found


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    rows = placements(jax.sharding.PositionalSharding(jax.devices()))
    text = ",\n".join(f"{json.dumps(layout)}: {json.dumps(found)}" for layout, found in rows.items())
    (Path(__file__).parent / "goldens" / "positional_sharding.json").write_text(f"{{\n{text}\n}}\n")
