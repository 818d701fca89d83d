"""`param_dtype=bfloat16`: matrices stored in the type that they multiply in, and the float32 masters that learn.

A layer's matrix is rounded to bfloat16 before every product anyway, so a run gives the numbers of float32 parameters,
and what is gathered, kept and sent is half as large. All else (norms, biases, tables, adapters) stays in float32 and
needs no master. Global bookkeeping, as in lora.py.
"""

import jax
import jax.numpy as jnp

from shardformer import lora
from shardformer.checks import MATRICES
from shardformer.config import Config
from shardformer.shards.parameters import LAYERS


def stored_types(parameters: dict, config: Config) -> dict:
    """The type of each parameter in a training state."""
    of = lambda module, name: config.param_dtype if module == LAYERS and name in MATRICES else "float32"
    return {module: {name: jnp.dtype(of(module, name)) for name in leaves} for module, leaves in parameters.items()}


def round_parameters(parameters: dict, config: Config) -> dict:
    """Exact ones as they are stored."""
    return jax.tree.map(lambda p, dtype: p.astype(dtype), parameters, stored_types(parameters, config))


def round_shapes(shapes: dict, config: Config) -> dict:
    """ShapeDtypeStructs with the stored types."""
    return jax.tree.map(_retype, shapes, stored_types(shapes, config))


def exact_shapes(shapes: dict) -> dict:
    """ShapeDtypeStructs of the same parameters in float32."""
    return jax.tree.map(lambda leaf: _retype(leaf, jnp.dtype("float32")), shapes)


def select_masters(exact: dict, config: Config) -> dict:
    """Of exact parameters, or of what else there is for each, those that are stored rounded and learn."""
    if config.param_dtype == "float32" or config.lora_rank:
        return {}
    return {LAYERS: {name: leaf for name, leaf in exact[LAYERS].items() if name in MATRICES}}


def learned_parameters(parameters: dict, masters: dict, config: Config) -> dict:
    """Those that the optimizer sees, in float32: a master in the place of each that is stored rounded."""
    return lora.select_learned(lora.replace_learned(parameters, masters), config)


def _retype(leaf, dtype):
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
