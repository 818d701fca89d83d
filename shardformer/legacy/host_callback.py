"""`jax.experimental.host_callback` over `jax.debug.callback` and `jax.experimental.io_callback`.

Under vmap, and so for every named axis of an xmap, the host is called once for each instance, without `transforms`.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import io_callback


class CallbackException(RuntimeError):
    """The error that `barrier_wait` raises after a callback failed."""


def id_tap(tap_func: Callable, arg, *, result=None, tap_with_device: bool = False, device_index: int = 0):
    """Returns `arg`, or `result` if it is given; the host calls `tap_func(arg, transforms)`."""
    _refuse_device("id_tap(tap_with_device=True)", tap_with_device)
    jax.debug.callback(functools.partial(_tap, tap_func), arg)
    return arg if result is None else result


def id_print(arg, *, result=None, tap_with_device=False, device_index=0, output_stream=None, threshold=1024, **labels):
    """Prints a line of the labels, if any, and one of the values; returns as `id_tap` does."""
    _refuse_device("id_print(tap_with_device=True)", tap_with_device)

    def show(value, _):
        heading = " ".join(f"{name}: {label}" for name, label in sorted(labels.items()))
        for line in [heading, _printed(value, threshold)]:
            if line and output_stream is not None:
                output_stream.write(f"{line}\n")
            elif line:
                print(line)

    return id_tap(show, arg, result=result)


def call(callback_func: Callable, arg, *, result_shape=None, call_with_device: bool = False, device_index: int = 0):
    """Returns the host's `callback_func(arg)`, in the shapes and dtypes of `result_shape`."""
    _refuse_device("call(call_with_device=True)", call_with_device)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), _dtype(leaf)), result_shape)

    def on_host(arg):
        result = callback_func(jax.tree.map(np.asarray, arg))
        return jax.tree.map(lambda leaf, shape: np.asarray(leaf, shape.dtype), result, shapes)

    return io_callback(on_host, shapes, arg)


def barrier_wait(logging_name: str | None = None) -> None:
    """Waits until every callback of the programs that were started has run."""
    try:
        jax.effects_barrier()
    except Exception as error:
        raise CallbackException(f"a host callback failed: {error}") from error


def stop_outfeed_receiver() -> None:
    """Does nothing: today's callbacks use no outfeed."""


def _tap(tap_func: Callable, arg):
    tap_func(jax.tree.map(np.asarray, arg), ())


def _dtype(leaf):
    return jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", None) or np.result_type(leaf))


def _printed(value, threshold: int) -> str:
    """Formats a tree in the notation that id_print had."""
    if isinstance(value, (tuple, list)):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return f"{opening} {' '.join(_printed(item, threshold) for item in value)} {closing}"
    if isinstance(value, dict):
        return f"{{ {' '.join(f'{key}={_printed(item, threshold)}' for key, item in sorted(value.items()))} }}"
    return np.array2string(value, threshold=threshold) if isinstance(value, np.ndarray) else str(value)


def _refuse_device(what: str, with_device: bool) -> None:
    if with_device:
        raise NotImplementedError(
            f"host_callback.{what}: a callback is not told its device any more; pass jax.lax.axis_index(name) in arg"
        )
