"""The mesh in scope: entered by `with Mesh(...)` or `with mesh(...)`, or assigned to `thread_resources.env`."""

import contextlib
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


class _ThreadResources(threading.local):
    """Where legacy code reads and assigns the environment of its thread.

    An assignment holds until the `with` block around it ends, and so a mesh entered after it comes first again.
    """

    def __init__(self):
        self._assigned = None
        self._around = None  # the entered mesh at the time of the assignment

    @property
    def env(self) -> ResourceEnv:
        entered = _entered_mesh()
        if self._assigned is not None and entered is self._around:
            return self._assigned
        return ResourceEnv(entered)

    @env.setter
    def env(self, env: ResourceEnv):
        self._assigned, self._around = env, _entered_mesh()

    @contextlib.contextmanager
    def with_loop(self, name, length: int):
        """The environment with one more loop, for a block."""
        before = self._assigned, self._around
        self.env = ResourceEnv(self.env.physical_mesh, (*self.env.loops, (name, length)))
        try:
            yield
        finally:
            self._assigned, self._around = before


thread_resources = _ThreadResources()


def current_mesh() -> Mesh | None:
    """The mesh in scope at this moment, None outside of any."""
    found = thread_resources.env.physical_mesh
    return None if found.empty else found


@contextlib.contextmanager
def mesh(devices, axis_names):
    """`Mesh(devices, axis_names)` entered, as legacy code spelled it: a context manager and a decorator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        entered = Mesh(devices, axis_names)
        entered.__enter__()
    try:
        yield entered
    finally:
        entered.__exit__(None, None, None)


def _entered_mesh() -> Mesh | None:
    # The one public way to see a mesh entered by `with Mesh(...)`; deprecated together with that form.
    from jax.interpreters import pxla

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        entered = pxla.thread_resources.env.physical_mesh
    return None if entered.empty else entered
