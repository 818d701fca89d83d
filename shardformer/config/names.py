"""Names that several packages use: mesh axes, modules of the model, the layers' matrices, streams of random keys."""

import enum

DP, MP, PP = "dp", "mp", "pp"  # data parallel, model (tensor) parallel, pipeline stages
AXES = (DP, MP, PP)  # in the order of mesh=; a mesh without pipeline stages has only the first two

PREFIX = "transformer/"  # of every parameter's module
LAYERS = f"{PREFIX}layers"  # the stacked parameters of all layers
MATRICES = ("q", "k", "v", "o", "up", "gate", "down")  # of a layer


class Stream(enum.IntEnum):
    """Streams of random keys, folded into a seed's key; far from the few keys that initialisation splits off it."""

    DROPOUT = 1 << 20
    LORA = 1 << 21
    ROUNDING = 1 << 22
