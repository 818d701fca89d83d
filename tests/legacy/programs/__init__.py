"""Small xmap programs over all that xmap means; the same lines run on jax 0.4.13, 0.4.30 and on today's."""

from . import arguments, collectives, elsewhere, gradients, products, removed, resources, transforms
from .registry import PROGRAMS

__all__ = [
    "PROGRAMS",
    "arguments",
    "collectives",
    "elsewhere",
    "gradients",
    "products",
    "removed",
    "resources",
    "transforms",
]
