"""The part of ray that mesh-transformer-jax uses, run in the current process."""

import multiprocessing.pool  # noqa: F401  ray brought this in, and checkpoint.py counts on it
import types


def remote(function=None, **resources):
    if function is None:
        return lambda actor: actor
    return types.SimpleNamespace(remote=function)


def get(results):
    return results
