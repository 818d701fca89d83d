"""JAX's Pallas kernels with outputs that carry manual axis types, which `check_vma=True` requires.

The kernels describe their outputs by bare `jax.ShapeDtypeStruct`s, and shard_map rejects these. While a kernel is
traced, its module sees a `jax` whose ShapeDtypeStruct adds the missing type.

Remove this file when JAX's kernels trace under `check_vma=True`: then `test_pallas_rejects_untyped_outputs` fails.
"""

import contextlib
import importlib
import threading
import types
from collections.abc import Iterator
from importlib.resources import files

import jax
from jax import Array

SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox.gmm"
_one_at_a_time = threading.RLock()  # a module is shared by all threads


def has_kernel(module: str) -> bool:
    """Returns whether this JAX has the module of a kernel: JAX moves them to the package tokamax."""
    _, *folders, name = module.split(".")
    return files(jax).joinpath(*folders, f"{name}.py").is_file()


@contextlib.contextmanager
def typed_kernel(x: Array, module: str = SPLASH) -> Iterator[types.ModuleType]:
    """Yields the module of JAX's kernel, patched so that its outputs vary over the same mesh axes as `x`."""
    kernel = importlib.import_module(module)
    with _one_at_a_time:
        kernel.jax = _JaxWithTypedShapes(jax.typeof(x).manual_axis_type)  # type: ignore[attr-defined]  # for the module
        try:
            yield kernel
        finally:
            kernel.jax = jax  # type: ignore[attr-defined]


class _JaxWithTypedShapes:
    """The module `jax` with a ShapeDtypeStruct that adds a manual axis type if none is given."""

    def __init__(self, manual_axis_type):
        class ShapeDtypeStruct(jax.ShapeDtypeStruct):
            def __init__(self, shape, dtype, **options):
                super().__init__(shape, dtype, **{"manual_axis_type": manual_axis_type} | options)

            @staticmethod
            def like(x):
                return ShapeDtypeStruct(x.shape, x.dtype)

        self.ShapeDtypeStruct = ShapeDtypeStruct

    def __getattr__(self, name):
        return getattr(jax, name)
