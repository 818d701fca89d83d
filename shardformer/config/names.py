"""Names that many packages use: mesh axes, modules of the model, the layers' matrices, streams of random keys."""

import enum

DP, MP, PP, CP = "dp", "mp", "pp", "cp"  # data parallel, model (tensor) parallel, pipeline stages, context parallel
AXES = (DP, MP, PP, CP)  # a mesh has the first two, and those after them only as far as it needs
HOST = "pinned_host"  # the memory of the host that a device reads and writes; every platform has it

PREFIX = "transformer/"  # of every parameter's module
LAYERS = f"{PREFIX}layers"  # the stacked parameters of all layers
MATRICES = ("q", "k", "v", "o", "up", "gate", "down")  # of a layer
EXPERT_MATRICES = ("expert_up", "expert_gate", "expert_down")  # [experts, inputs, outputs] in each layer
SHARED_MATRICES = ("shared_up", "shared_gate", "shared_down")  # of the expert that every token uses
LATENT_MATRICES = ("q_latent", "kv_latent")  # to the latents that queries, and keys and values, are computed from
ALL_MATRICES = (*MATRICES, *EXPERT_MATRICES, *SHARED_MATRICES, *LATENT_MATRICES)  # of layers of any kind
ROUTER_SHIFT = "router_shift"  # a bias of the router's logits, with expert_bias
ROUTER_BIAS = "router_bias"  # by which a router ranks experts if balance_rate balances their load
LORA_IN, LORA_OUT = "_lora_in", "_lora_out"  # the two factors of a matrix's adapter
CODES, SCALES = "_codes", "_scales"  # the parameters of a quantised matrix
BLOCKS = "_blocks"  # the third of them, with weights=nf4: the scales of its scales
OF_KEY_VALUE_HEADS = {
    f"{matrix}{suffix}" for matrix in ("k", "v") for suffix in ("", "_bias", "_scale", LORA_OUT, CODES, SCALES)
}


def is_stacked(module: str) -> bool:
    """Returns whether the module's parameters are those of all layers, stacked on a leading L."""
    return module.startswith(LAYERS)


def is_part(name: str) -> bool:
    """Returns whether a parameter is a part of a quantised matrix: codes or scales."""
    return name.endswith((CODES, SCALES, BLOCKS))


def is_of_experts(name: str) -> bool:
    """Returns whether a leaf of a layer belongs to its experts: a matrix, an adapter's factor, codes or scales."""
    return name.startswith(EXPERT_MATRICES)


def is_factor_of_product(name: str) -> bool:
    """Returns whether a parameter only multiplies activations: a matrix, an adapter's factor, an untied head."""
    return name.removesuffix(LORA_IN).removesuffix(LORA_OUT) in (*ALL_MATRICES, "project", "w")


def has_key_value_heads(name: str) -> bool:
    """Returns whether a parameter of this full name has the columns of key/value heads."""
    module, _, leaf = name.rpartition("/")
    return module.endswith("/layers") and leaf in OF_KEY_VALUE_HEADS


class Stream(enum.IntEnum):
    """Streams of random keys, folded into a seed's key; far from the few keys that initialisation splits off it."""

    DROPOUT = 1 << 20
    LORA = 1 << 21
    ROUNDING = 1 << 22
    SCORE = 1 << 23
    NEXT = 1 << 24


# The forms of `rotary_scaling`, which `rotary_scaling.py` parses.
ROTARY_SCALINGS = {
    "linear": "linear:FACTOR",
    "llama3": "llama3:FACTOR,LOW,HIGH,OLD_SEQ",
    "yarn": "yarn:FACTOR,LOW,HIGH,OLD_SEQ,ATTENTION",
    "yarn_untruncated": "yarn_untruncated:FACTOR,LOW,HIGH,OLD_SEQ,ATTENTION",
    "longrope": "longrope:OLD_SEQ,ATTENTION,SHORT,...,LONG,...",
}
