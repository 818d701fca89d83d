"""`jax.linear_util`: `jax.extend.linear_util`, with a `wrap_init` that needs no debug information."""

from collections.abc import Callable

import jax.api_util
from jax.extend import linear_util
from jax.extend.linear_util import (  # noqa: F401  # the names of the old module
    StoreException,
    WrappedFun,
    cache,
    merge_linear_aux,
    transformation,
    transformation_with_aux,
)


def wrap_init(f: Callable, params: dict | None = None, **options) -> WrappedFun:
    """Wraps a function for transformations; today's jax wants to know where the function comes from."""
    options.setdefault("debug_info", jax.api_util.debug_info("jax.linear_util.wrap_init", f, (), {}))
    return linear_util.wrap_init(f, params, **options)
