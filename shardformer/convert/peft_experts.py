"""PEFT's adapters of experts, which transformers 5 stores as two parameters of a layer: gate_up_proj and down_proj.

PEFT wraps the module of the experts for each of its parameters with adapters. If both have some, those of gate_up_proj
are inside, under `base_layer`. A is [experts * rank, inputs], the rows of an expert together; B is
[outputs, rank * experts], the columns of a rank together.
"""

import numpy as np

from shardformer.config import Config
from shardformer.config.names import EXPERT_MATRICES
from shardformer.convert.families import Part, Stored, list_stored

INNER = ".base_layer"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
FIRST = ".experts.0."  # in the names of the first expert's matrices
# Names that transformers 5 gives the module of a layer's experts, by that of its files.
RENAMED = {"block_sparse_moe": "mlp"}


def list_parameters(family: str, config: Config) -> list[Stored]:
    """Lists the parameters of all experts of each layer, with the shape and the parts of one expert's matrix."""
    result = []
    for stored in list_stored(family, config) if config.experts.experts else []:
        layers, _, ours = stored.parts[0].ours.rpartition("/")
        if ours != "expert_gate" or FIRST not in stored.name:
            continue
        module = stored.name.partition(FIRST)[0]
        for theirs, renamed in RENAMED.items():
            module = module.replace(f".{theirs}", f".{renamed}")
        outputs, inputs = stored.shape
        rows = {"expert_gate": slice(0, outputs), "expert_up": slice(outputs, 2 * outputs)}
        gate_up = tuple(Part(f"{layers}/{name}", np.transpose, (cut,)) for name, cut in rows.items())
        down = (Part(f"{layers}/expert_down", np.transpose, (slice(0, inputs),)),)
        result += [
            Stored(f"{module}.experts.{GATE_UP}", (2 * outputs, inputs), gate_up, stored.layer, stored.row),
            Stored(f"{module}.experts.{DOWN}", (inputs, outputs), down, stored.layer, stored.row),
        ]
    return result


def find_adapted(config: Config) -> set[str]:
    """Returns the parameters of experts that have adapters."""
    names = {name for name in config.lora.lora_names if name in EXPERT_MATRICES}
    return ({GATE_UP} if names - {"expert_down"} else set()) | ({DOWN} if "expert_down" in names else set())


def is_parameter(name: str) -> bool:
    """Returns whether a name, without its layer, is a parameter of experts."""
    return name.endswith((f".experts.{GATE_UP}", f".experts.{DOWN}"))


def name_module(parameter: str, adapted: set[str]) -> str:
    """Returns the module that has the adapters of a parameter, if these parameters have some."""
    module, _, name = parameter.rpartition(".")
    return f"{module}{INNER}" if name == GATE_UP and len(adapted) == 2 else module


def find_module(parameter: str, shapes: dict[str, tuple[int, ...]], inputs: int, outputs: int) -> str:
    """Returns the module whose adapters have the inputs and outputs of a parameter; no two of a layer have both."""
    module = parameter.rpartition(".")[0]
    for each in (f"{module}{INNER}", module):
        a, b = (next((s for key, s in shapes.items() if key.endswith(f".{each}.lora_{f}.weight")), ()) for f in "AB")
        if a[-1:] == (inputs,) and b[:1] == (outputs,):
            return each
    return parameter


def stack(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the arrays of all experts from (A, B) of each."""
    b_ORE = np.stack([b_OR for _, b_OR in pairs], axis=-1)
    return np.concatenate([a_RI for a_RI, _ in pairs]), b_ORE.reshape(len(b_ORE), -1)


def unstack(a: np.ndarray, b: np.ndarray, experts: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (A, B) of each expert."""
    b_ORE = b.reshape(len(b), -1, experts)
    return [(a_RI, b_ORE[..., e]) for e, a_RI in enumerate(a.reshape(experts, -1, a.shape[-1]))]
