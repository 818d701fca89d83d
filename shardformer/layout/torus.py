"""The dimensions of a TPU's torus that the mesh axis dp follows."""

import itertools
import math

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardformer.config import Config
from shardformer.config.names import CP
from shardformer.devices.chips import Hardware


def factor_dp(device_mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Factors dp into the torus dimensions that it follows, the slowest first: (4, 4) for 16x1 on 4x4 chips.

    Returns (dp,) if dp follows one dimension, if it is not in row-major order (a ring through all chips, two or more
    slices), or if the devices have no coordinates; and () if the mesh splits the context.
    """
    if CP in device_mesh.shape:
        return ()  # ZeRO splits over dp x cp at once
    dp = next(iter(device_mesh.shape.values()))
    # A GPU of JAX 0.11 has coordinates too, but no core.
    if isinstance(device_mesh, AbstractMesh) or getattr(device_mesh.devices.flat[0], "core_on_chip", None) is None:
        return (dp,)
    points = np.array([(*device.coords, device.core_on_chip) for device in device_mesh.devices.flat])
    lines = points.reshape(dp, -1, points.shape[1]).swapaxes(0, 1)  # along dp, one for each index of the other axes
    result = {_factor_line(line) for line in lines}
    return result.pop() if len(result) == 1 else (dp,)


def factor_slice(config: Config, hardware: Hardware, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimensions that dp follows on a slice of these sizes, as `factor_dp` does for devices.

    Returns (dp,) if dp follows parts of some, and () if no torus can be used.
    """
    if hardware.platform != "tpu" or config.parallel.cp > 1:
        return ()
    if math.prod(sizes) <= 8 and len(sizes) == 2:
        return (config.parallel.dp,)  # JAX lays out 8 or fewer chips of a 2-D slice as a ring
    long = [size for size in sizes if size > 1]
    choices = (chosen for n in range(len(long), 0, -1) for chosen in itertools.combinations(long, n))
    return next((chosen for chosen in choices if math.prod(chosen) == config.parallel.dp), (config.parallel.dp,))


def unroll_ring(device_mesh: Mesh) -> Mesh:
    """Reorders a dp that goes through all chips in a ring, as JAX orders v5e:4x4, to row-major order.

    Over a ring of 16 chips the TPU's compiler all-reduces gradients; over 8 chips it reduce-scatters them.
    """
    devices = device_mesh.devices
    if devices.size <= 8 or factor_dp(device_mesh) != (devices.size,) or devices.flat[0].platform != "tpu":
        return device_mesh
    by_coordinates = sorted(devices.flat, key=lambda device: (device.coords, device.core_on_chip))
    ordered = Mesh(np.array(by_coordinates).reshape(devices.shape), device_mesh.axis_names)
    return ordered if len(factor_dp(ordered)) > 1 else device_mesh


def _factor_line(points: np.ndarray) -> tuple[int, ...]:
    """Returns the sizes of the grid whose row-major order the points follow, each axis along one dimension.

    Returns (count,) if the points follow no grid.
    """
    count = len(points)
    sizes: tuple[int, ...] = ()
    if count == 1 or len(np.unique(points, axis=0)) < count:
        return (count,)
    moved = points - points[0]
    while (stride := math.prod(sizes)) < count:
        steps = moved[::stride]
        dimension = np.flatnonzero(steps[1])
        if len(dimension) != 1:
            return (count,)
        elsewhere = np.delete(steps, dimension, axis=1).any(axis=1)
        size = int(elsewhere.argmax()) or len(steps)
        if count % (stride * size):
            return (count,)
        sizes = (size, *sizes)
    grid = moved.reshape(*sizes, -1)
    along = [np.moveaxis(grid, axis, 0)[(slice(None), *[slice(1)] * (len(sizes) - 1))] for axis in range(len(sizes))]
    total = sum(np.moveaxis(part, 0, axis) for axis, part in enumerate(along))
    return sizes if np.array_equal(total, grid) else (count,)
