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


class _ThreadResources(threading.local):
    """Where legacy code reads and assigns the environment of its thread.

    An assignment holds until the `with Mesh(...)` around it ends; a mesh that is entered after it comes first.
    """

    def __init__(self):
        self._assigned = {}  # the mesh entered at the time of an assignment, or None -> what was assigned
        self._loops = ()

    @property
    def env(self) -> ResourceEnv:
        entered = self._entered()
        env = self._assigned.get(entered) or ResourceEnv(entered)
        return ResourceEnv(env.physical_mesh, (*env.loops, *self._loops)) if self._loops else env

    @env.setter
    def env(self, env: ResourceEnv):
        entered = self._entered()
        self._assigned[entered] = env

    def _entered(self) -> Mesh | None:
        entered = _entered_mesh()
        if entered is None:  # every block has ended, and what was assigned in one is over
            self._assigned = {None: self._assigned[None]} if None in self._assigned else {}
        return entered

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
    entered = _jax_resources().env.physical_mesh
    return None if entered.empty else entered


@functools.cache
def _jax_resources():
    """The one public way to see a mesh that `with Mesh(...)` has entered; deprecated together with that form.

    Looked up once: to change the filters of warnings at every call would not be safe among threads.
    """
    from jax.interpreters import pxla

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pxla.thread_resources


_jax_resources()
