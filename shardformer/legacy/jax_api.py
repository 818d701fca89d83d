"""`jax.api`, the module that had jax's transformations before `jax` itself was their home."""

import jax


def __getattr__(name: str):
    return getattr(jax, name)
