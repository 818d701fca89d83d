"""Names that several packages use: mesh axes, modules of the model, the layers' matrices, streams of random keys."""

import enum

DP, MP, PP, CP = "dp", "mp", "pp", "cp"  # data parallel, model (tensor) parallel, pipeline stages, context parallel
AXES = (DP, MP, PP, CP)  # a mesh has the first two, and those after them only as far as it needs

PREFIX = "transformer/"  # of every parameter's module
LAYERS = f"{PREFIX}layers"  # the stacked parameters of all layers
MATRICES = ("q", "k", "v", "o", "up", "gate", "down")  # of a layer


def is_stacked(module: str) -> bool:
    """Returns whether the module's parameters are those of all layers, stacked on a leading L."""
    return module.startswith(LAYERS)


class Stream(enum.IntEnum):
    """Streams of random keys, folded into a seed's key; far from the few keys that initialisation splits off it."""

    DROPOUT = 1 << 20
    LORA = 1 << 21
    ROUNDING = 1 << 22
