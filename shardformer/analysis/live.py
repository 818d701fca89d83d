"""Bytes on this machine's devices: predicted, compiled, and held by live arrays after one step."""

from typing import Any, NamedTuple

import jax
import numpy as np

from shardformer.analysis import memory, temporaries, traced
from shardformer.analysis.memory import DeviceBytes
from shardformer.config import Config
from shardformer.config.names import HOST
from shardformer.layout import mesh
from shardformer.tables import format_bytes, format_table
from shardformer.training.trainer import Trainer

SMALL = 0.01  # of the state: smaller arrays are not reported


class Measured(NamedTuple):
    """The bytes of one device from three sources."""

    config: Config
    predicted: DeviceBytes
    temporaries: int  # estimated
    compiled_state: int
    compiled_temporaries: int
    live: dict[str, dict]  # by kind, {device: bytes}
    peak: int | None  # None if the backend does not count it
    whole: list[str]  # arrays that one device has in full


def measure(config: Config) -> Measured:
    """Compiles the step and runs it once, on the config's mesh."""
    traced.check_one_program(config)
    trainer = Trainer(config, mesh.make(config))
    state, batch = trainer.init(), trainer.model.make_batch()
    abstract: Any = trainer.abstract_batch
    lowered: Any = trainer.lower(state, abstract)[0]
    compiled = lowered.compile()
    planned = compiled.memory_analysis()
    state, metrics = compiled(state, trainer.to_devices(batch) | trainer.model.make_constants(), np.int32(0))
    jax.block_until_ready(metrics)
    updated = state.optimizer, state.masters
    live = {"params": bytes_by_device(state.params), "average": bytes_by_device(state.average)}
    live |= {"optimizer": bytes_by_device(updated), "host": bytes_by_device(updated, in_host_memory=True)}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max((counts.get("peak_bytes_in_use", 0) for counts in stats), default=0) or None
    return Measured(
        config, memory.predict_bytes(config), temporaries.estimate_temporaries(trainer.model.layout),
        planned.argument_size_in_bytes, planned.temp_size_in_bytes, live, peak, whole_on_one_device(state),
    )  # fmt: skip


def bytes_by_device(tree, in_host_memory: bool = False) -> dict:
    """Returns {device: bytes} of the arrays' shards on this process's devices, or in the host's memory for them."""
    counts: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        if (leaf.sharding.memory_kind == HOST) != in_host_memory:
            continue
        for shard in leaf.addressable_shards:
            counts[shard.device] = counts.get(shard.device, 0) + shard.data.nbytes
    return counts


def whole_on_one_device(state) -> list[str]:
    """Returns the names of arrays that only one device of a larger mesh holds."""
    leaves = jax.tree.leaves_with_path(state)
    count = max(len(leaf.sharding.device_set) for _, leaf in leaves)
    large = SMALL * sum(leaf.nbytes for _, leaf in leaves)
    return [
        f"{jax.tree_util.keystr(path)} ({format_bytes(leaf.nbytes)})"
        for path, leaf in leaves
        if len(leaf.sharding.device_set) == 1 < count and leaf.nbytes > large
    ]


def format_measured(m: Measured) -> str:
    most = {kind: max(by_device.values(), default=0) for kind, by_device in m.live.items()}
    rewards = m.predicted.reward_model  # in no step
    stored, total = m.predicted.total - m.predicted.gradients - rewards, m.predicted.total
    if jax.default_backend() == "cpu":  # whose one memory is the host's
        stored, total = stored + m.predicted.host, total + m.predicted.host
    rows: list[tuple[str, float | str, float | str, float | str]] = [
        ("parameters", m.predicted.parameters, "", most["params"]),
        ("optimizer", m.predicted.optimizer, "", most["optimizer"]),
        *([("average", m.predicted.average, "", most["average"])] if m.config.training.ema else []),
        ("state and batch", stored, m.compiled_state, ""),
        ("gradients", m.predicted.gradients, "", ""),
        ("activations, temporaries", m.temporaries, "", ""),
        *([("reward model", rewards, "", "")] if rewards else []),
        ("all temporary", m.predicted.gradients + m.temporaries, m.compiled_temporaries, ""),
        ("together", total + m.temporaries, m.compiled_state + m.compiled_temporaries + rewards, m.peak or ""),
    ]
    printed = [[row[0], *(cell if isinstance(cell, str) else format_bytes(cell) for cell in row[1:])] for row in rows]
    if m.predicted.host:
        printed.append(
            ["optimizer, in the host's memory", format_bytes(m.predicted.host), "", format_bytes(most["host"])]
        )
    lines = [
        format_table(printed, [f"on one device of mesh {m.config.parallel.mesh}", "predicted", "compiled", "live"])
    ]
    lines += [f"whole on one device: {name}" for name in m.whole]
    if m.peak is None:
        lines.append("this backend does not count its peak; temporaries and their sum are as compiled")
    return "\n".join(lines)
