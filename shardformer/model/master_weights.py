"""`param_dtype=bfloat16`: the layers' matrices stored in bfloat16, and the float32 masters that the optimizer updates.

A matrix is rounded to bfloat16 before every product anyway, so a run gives the numbers of float32 parameters, and what
is stored and gathered is half as large. All else (norms, biases, tables, adapters) stays in float32 without a master.
"""

import jax
import jax.numpy as jnp

from shardformer.config import Config
from shardformer.config.names import LAYERS, MATRICES
from shardformer.model import lora


def stored_types(parameters: dict, config: Config) -> dict:
    """The type of each parameter in a training state."""
    choose = lambda module, name: config.param_dtype if module == LAYERS and name in MATRICES else "float32"
    return {module: {name: jnp.dtype(choose(module, name)) for name in leaves} for module, leaves in parameters.items()}


def round_parameters(parameters: dict, config: Config) -> dict:
    """Float32 parameters in the types in which they are stored."""
    return jax.tree.map(lambda p, dtype: p.astype(dtype), parameters, stored_types(parameters, config))


def round_shapes(shapes: dict, config: Config) -> dict:
    """ShapeDtypeStructs with the stored types."""
    return jax.tree.map(_retype, shapes, stored_types(shapes, config))


def exact_shapes(shapes: dict) -> dict:
    """ShapeDtypeStructs of the same parameters in float32."""
    return jax.tree.map(lambda leaf: _retype(leaf, jnp.dtype("float32")), shapes)


def select_masters(exact: dict, config: Config) -> dict:
    """Of float32 parameters (or of their specs) those that are stored in bfloat16 and learn."""
    if config.param_dtype == "float32" or config.lora_rank:
        return {}
    return {LAYERS: {name: leaf for name, leaf in exact[LAYERS].items() if name in MATRICES}}


def learned_parameters(parameters: dict, masters: dict, config: Config) -> dict:
    """What the optimizer updates, in float32: a master in place of each parameter that is stored in bfloat16."""
    return lora.select_learned(lora.replace_learned(parameters, masters), config)


def _retype(leaf, dtype):
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
