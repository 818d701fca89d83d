"""`param_dtype=bfloat16`: the layers' matrices stored in bfloat16, and the float32 masters that the optimizer updates.

Every product rounds its matrix to bfloat16 anyway, so a run gives the numbers of float32 parameters, and stores and
gathers half the bytes. Norms, biases, tables and adapters stay in float32 without a master.

With `quantize_aware=`, the same parameters as codes would store are rounded, in float32; see
`quantized/rounded_weights.py`.
"""

import jax
import jax.numpy as jnp

from shardformer.adapters.adapter_keys import replace_trainable, select_trainable
from shardformer.config import Config
from shardformer.config.names import ALL_MATRICES, LAYERS, is_part

ROUNDED = {*ALL_MATRICES}  # of a layer


def stored_types(parameters: dict, config: Config) -> dict:
    """Returns the dtype of each parameter in a training state."""
    return {
        module: {name: _stored_type(module, name, leaf, config) for name, leaf in leaves.items()}
        for module, leaves in parameters.items()
    }


def are_rounded(config: Config) -> bool:
    """Returns whether `round_parameters` changes any parameter."""
    return config.stored.quantize_aware != "none" or config.optimizer.param_dtype != "float32"


def have_code_values(config: Config, step: int) -> bool:
    """Returns whether the parameters after this step have the values of codes."""
    return config.stored.quantize_aware != "none" and step >= _rounded_weights().find_first_rounded(config)


def round_parameters(parameters: dict, config: Config, step) -> dict:
    """Casts the float32 parameters after `step` to their stored dtypes, or rounds them to the values of codes."""
    if config.stored.quantize_aware != "none":
        return _rounded_weights().round_to_codes(parameters, config, step)
    return jax.tree.map(lambda p, dtype: p.astype(dtype), parameters, stored_types(parameters, config))


def round_shapes(shapes: dict, config: Config) -> dict:
    """Gives ShapeDtypeStructs the stored dtypes."""
    return jax.tree.map(_retype, shapes, stored_types(shapes, config))


def exact_shapes(shapes: dict) -> dict:
    """Gives ShapeDtypeStructs the dtype float32."""
    return jax.tree.map(lambda leaf: _retype(leaf, jnp.dtype("float32")), shapes)


def select_masters(exact: dict, config: Config) -> dict:
    """Returns the float32 parameters (or their specs) that are trainable and stored rounded."""
    if config.stored.quantize_aware != "none":
        return _rounded_weights().select_rounded(exact, config)
    if config.optimizer.param_dtype == "float32" or config.lora.lora_rank:
        return {}
    return {LAYERS: {name: leaf for name, leaf in exact[LAYERS].items() if name in ROUNDED}}


def trainable_parameters(parameters: dict, masters: dict, config: Config) -> dict:
    """Returns the trainable parameters in float32: the master of each parameter that is stored rounded."""
    return select_trainable(replace_trainable(parameters, masters), config)


def make_exact(parameters: dict) -> dict:
    """Casts parameters to float32, except the parts of quantised matrices."""
    return {
        module: {name: leaf if is_part(name) else leaf.astype(jnp.float32) for name, leaf in leaves.items()}
        for module, leaves in parameters.items()
    }


def _rounded_weights():
    from shardformer.quantized import rounded_weights  # not imported without quantize_aware

    return rounded_weights


def _stored_type(module: str, name: str, leaf, config: Config):
    if is_part(name):
        return leaf.dtype
    return jnp.dtype(config.optimizer.param_dtype if module == LAYERS and name in ROUNDED else "float32")


def _retype(leaf, dtype):
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
