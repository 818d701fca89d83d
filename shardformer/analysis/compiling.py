"""Compiles a train step without running it: for chips that are not here, by libtpu, or for this machine's CPU."""

import contextlib
import importlib.util
import os
import re
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from shardformer.analysis import hlo, program_collectives, traced, wire_time
from shardformer.analysis.program_collectives import Collective
from shardformer.analysis.wire_time import Timeline
from shardformer.config import Config
from shardformer.devices.chips import Slice
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.training.trainer import Trainer


class CompiledStep(NamedTuple):
    """A compiler's figures of one step on one device."""

    compiler: str
    seconds: float  # to compile
    arguments: int  # bytes: the state and the batch
    temporary: int  # bytes
    collectives: list[Collective] | None  # None if the compiler does not print its program
    refused: str = ""  # the compiler's message if the step does not fit
    cycles: int = 0  # of the chip, estimated by a TPU's compiler: hlo.estimate_cycles
    timeline: Timeline | None = None  # of a TPU's program

    @property
    def bytes(self) -> int:
        return self.arguments + self.temporary


def has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def tpu_mesh(config: Config, chips: Slice) -> Mesh:
    """Returns the config's mesh over a slice of TPUs that need not exist."""
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # another process may compile, too: no device is claimed
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }.items():
        os.environ.setdefault(name, value)
    options = {"chip_config_name": "megacore"} if chips.name == "v4" else {}  # else its two cores count as devices
    try:
        topology = topologies.get_topology_desc(str(chips), "tpu", **options)
    except Exception as error:
        raise UsageError(f"chip={chips}: libtpu knows no such slice ({str(error).splitlines()[0][:200]})") from None
    return mesh.arrange(config, topology.devices)


def compile_step(config: Config, device_mesh: Mesh, compiler: str, chips: Slice | None = None) -> CompiledStep:
    """Compiles a step of one program; with TPU `chips`, times it by its schedule."""
    traced.check_one_program(config)
    trainer = Trainer(config, device_mesh)
    begin = time.monotonic()
    lowered: Any = trainer.lower(trainer.abstract, trainer.abstract_batch)[0]
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "HbmOom" not in str(error):
            raise
        return CompiledStep(compiler, time.monotonic() - begin, 0, 0, None, _out_of_memory(str(error)))
    memory, collectives, cycles, timeline = compiled.memory_analysis(), None, 0, None
    with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):  # a program may be too new to be printed
        text = compiled.as_text()
        collectives, cycles = program_collectives.parse_collectives(text), hlo.estimate_cycles(text)
        if compiler == "libtpu" and chips:
            places = np.array([device.coords for device in device_mesh.devices.flat])
            timeline = wire_time.time_step(text, places, config, chips)
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return CompiledStep(compiler, time.monotonic() - begin, *sizes, collectives, cycles=cycles, timeline=timeline)


def _out_of_memory(message: str) -> str:
    match = re.search(r"([\d.]+[GMK])\)? (?:of|exceeds)[^\d]*([\d.]+[GMK])", message)
    return f"the compiler wants {match[1]}iB of {match[2]}iB" if match else message.splitlines()[0][:200]
