"""The factors of dp that are dimensions of a torus, by the devices' coordinates."""

import math
import types

import numpy as np
import pytest

from shardformer.layout import mesh, torus
from tests import shared


def walk(*sizes):
    """The points of a grid in row-major order."""
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1)


def stand_in(points, dp, mp=1):
    """A mesh of devices at these points, of which dp is the slower axis."""
    devices = np.empty(dp * mp, object)
    for i, point in enumerate(points):
        devices[i] = types.SimpleNamespace(coords=tuple(point.tolist()), core_on_chip=0)
    return types.SimpleNamespace(shape={"dp": dp, "mp": mp}, devices=devices.reshape(dp, mp))


RING = np.array([(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0)])  # how 8 chips of a v5e are ordered


@pytest.mark.parametrize(
    ("points", "dp", "mp", "expected"),
    [
        (walk(4, 4), 16, 1, (4, 4)),
        (walk(2, 2, 2), 8, 1, (2, 2, 2)),
        (walk(4, 4, 4)[:, ::-1], 64, 1, (4, 4, 4)),
        (walk(16, 16), 256, 1, (16, 16)),
        (walk(4, 4), 4, 4, (4,)),
        (walk(4, 4), 8, 2, (4, 2)),  # mp takes half of a dimension, and dp the rest of it
        (walk(4, 2, 2), 8, 2, (4, 2)),
        (walk(1, 8), 8, 1, (8,)),
        (RING, 8, 1, (8,)),
        (np.concatenate([walk(2, 2), walk(2, 2)]), 8, 1, (8,)),  # two slices, whose chips have the same places
        (walk(4, 4)[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 14]], 16, 1, (16,)),  # out of order at the end
        (walk(4, 4)[:12], 12, 1, (3, 4)),
        (walk(4, 4)[:6], 6, 1, (6,)),  # half a row is left over
        (walk(2, 2), 1, 4, (1,)),
    ],
)
def test_the_dimensions_that_dp_takes(points, dp, mp, expected):
    assert torus.factor_dp(stand_in(points, dp, mp)) == expected


def test_devices_without_coordinates_are_one_dimension():
    assert torus.factor_dp(mesh.make(shared.tiny(mesh="8x1"))) == (8,)
    assert torus.factor_dp(mesh.make_abstract(shared.tiny(mesh="4x2"))) == (4,)


def test_gpu_with_coordinates_is_one_dimension():
    """As an H200 of jaxlib 0.11.2: its coordinates are there, and AttributeError is raised for its core."""
    devices = np.empty((1, 1), object)
    devices[0, 0] = types.SimpleNamespace(platform="gpu", coords=(0, 0, 0))
    assert torus.factor_dp(types.SimpleNamespace(shape={"dp": 1, "mp": 1}, devices=devices)) == (1,)
