"""A plugin of pytest: jax without the parts that it is about to remove, on which shardformer.legacy must not depend.

`python -m pytest -p tests.legacy.future_jax tests/legacy/test_notebook.py`; scripts import it if FUTURE_JAX is set.
"""

import sys

from jax.interpreters import pxla
from jax.sharding import Mesh

assert "shardformer.legacy" not in sys.modules, "remove the names before install()"


def _without_thread_resources(name):
    if name == "thread_resources":
        raise AttributeError(f"module {pxla.__name__!r} has no attribute {name!r}")
    return _deprecated_name(name)


# The name is deprecated, so that the module's __getattr__ serves it.
_deprecated_name = pxla.__getattr__
pxla.__getattr__ = _without_thread_resources
del Mesh.__enter__
del Mesh.__exit__
assert not hasattr(pxla, "thread_resources")
