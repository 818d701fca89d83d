"""The mesh in scope: entered by `with Mesh(...)` or `with mesh(...)`, or assigned to `thread_resources.env`.

The record is this module's own, because jax is about to remove its record, `jax.interpreters.pxla.thread_resources`.
"""

import contextlib
import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable

import jax
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

    An assigned mesh ends with the next `with Mesh(...)` block, as it did under xmap.
    """

    def __init__(self):
        self._entered: list[Mesh] = [NO_MESH]
        self._mesh = NO_MESH
        self._loops: tuple = ()

    @property
    def env(self) -> ResourceEnv:
        return ResourceEnv(self._mesh, self._loops)

    @env.setter
    def env(self, env: ResourceEnv):
        self._mesh, self._loops = env.physical_mesh, tuple(env.loops)
        jax_resources = _jax_resources()
        if jax_resources is not None:  # jax's functions may look up the assigned mesh there
            jax_resources.env = jax_resources.env.with_mesh(env.physical_mesh)

    def enter(self, mesh: Mesh) -> None:
        self._entered.append(mesh)
        self._mesh = mesh

    def leave(self) -> None:
        self._entered.pop()
        self._mesh = self._entered[-1]

    @contextlib.contextmanager
    def with_loop(self, name, length: int):
        """Adds a loop to the environment for a block."""
        before = self._loops
        self._loops = (*before, (name, length))
        try:
            yield
        finally:
            self._loops = before


thread_resources = _ThreadResources()


def current_mesh() -> Mesh | None:
    """The mesh in scope at this moment, None outside of any."""
    result = thread_resources.env.physical_mesh
    return None if result.empty else result


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
    """Returns jax's record of the mesh in scope; None once jax has removed it.

    Looked up once: changing the filters of warnings at every call would not be safe among threads.
    """
    from jax.interpreters import pxla

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(pxla, "thread_resources", None)


def _jax_records_meshes() -> bool:
    """Returns True as long as jax has `with mesh:`, whose mesh its functions look up, and allows it."""
    return _jax_enter is not None and not getattr(jax.config, "jax_disallow_mesh_context_manager", False)


_jax_enter, _jax_exit = getattr(Mesh, "__enter__", None), getattr(Mesh, "__exit__", None)


def _record_entered_meshes() -> None:
    """Makes `with Mesh(...)` tell this module, and defines it for a jax that has removed it.

    jax may drop `Mesh.__enter__` and its record of the mesh at any release: both are deprecated.
    """

    def enter(self):
        if _jax_records_meshes():
            _jax_enter(self)
        thread_resources.enter(self)
        return self

    def leave(self, *error):
        thread_resources.leave()
        return _jax_exit(self, *error) if _jax_records_meshes() else False

    def decorate(self, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return call

    methods: dict[str, Callable] = {"__enter__": enter, "__exit__": leave}
    if not any("__call__" in vars(kind) for kind in Mesh.__mro__):
        methods["__call__"] = decorate
    for name, method in methods.items():
        setattr(Mesh, name, method)


_jax_resources()
_record_entered_meshes()
