"""The mesh in scope: entered by `with Mesh(...)` or `with mesh(...)`, or assigned to `thread_resources.env`."""

import contextlib
import functools
import threading
import warnings
from collections import OrderedDict

import numpy as np
from jax.sharding import Mesh

NO_MESH = Mesh(np.empty((), object), ())


class ResourceEnv:
    """The resources in scope: a physical mesh, or an empty one, and serial loops as (name, length) pairs."""

    def __init__(self, physical_mesh: Mesh | None = None, loops=()):
        self.physical_mesh = NO_MESH if physical_mesh is None else physical_mesh
        self.loops = tuple(loops)

    @property
    def shape(self):
        """Resource name to size, the mesh's axes first; empty outside of a mesh."""
        return OrderedDict([*self.physical_mesh.shape.items(), *self.loops])

    @property
    def resource_axes(self):
        return set(self.shape)

    def __repr__(self):
        return f"ResourceEnv({self.physical_mesh!r}, {self.loops!r})"


EMPTY_ENV = ResourceEnv()


class _ThreadResources(threading.local):
    """The environment of the current thread, which legacy code reads and assigns.

    The mesh is stored in jax's own record, so that an assigned one ends as it always did: with any `with Mesh(...)`.
    """

    def __init__(self):
        self._loops = ()

    @property
    def env(self) -> ResourceEnv:
        return ResourceEnv(_jax_resources().env.physical_mesh, self._loops)

    @env.setter
    def env(self, env: ResourceEnv):
        resources = _jax_resources()
        resources.env = resources.env.with_mesh(env.physical_mesh)
        self._loops = env.loops

    @contextlib.contextmanager
    def with_loop(self, name, length: int):
        """The environment with one more loop, for a block."""
        before = self._loops
        self._loops = (*before, (name, length))
        try:
            yield
        finally:
            self._loops = before


thread_resources = _ThreadResources()


def current_mesh() -> Mesh | None:
    """The mesh in scope at this moment, None outside of any."""
    found = thread_resources.env.physical_mesh
    return None if found.empty else found


@contextlib.contextmanager
def mesh(devices, axis_names):
    """`Mesh(devices, axis_names)` entered, as legacy code spelled it: a context manager and a decorator.

    Unlike `with Mesh(...)` it restores, at its end, what was assigned to `thread_resources.env` before it.
    """
    before = thread_resources.env
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        entered = Mesh(devices, axis_names)
        entered.__enter__()
    try:
        yield entered
    finally:
        entered.__exit__(None, None, None)
        thread_resources.env = before


@functools.cache
def _jax_resources():
    """The one public way to see a mesh that `with Mesh(...)` has entered; deprecated together with that form.

    Looked up once: changing the filters of warnings at every call would not be safe among threads.
    """
    from jax.interpreters import pxla

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pxla.thread_resources


_jax_resources()
