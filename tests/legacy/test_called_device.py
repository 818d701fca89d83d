"""`x.device()` gives the device, and `x.device` goes on as today's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from shardformer.legacy.install import installed

X = np.arange(3, dtype=np.float32)


@pytest.fixture(autouse=True)
def put_back():
    with installed():
        yield


def test_a_call_gives_the_device():
    second = jax.devices()[1]
    assert jax.device_put(X, second).device() is second
    rows = jax.pmap(lambda x: x)(jnp.ones((2, 3)))
    assert [row.device() for row in rows.device_buffers] == jax.devices()[:2]
    with pytest.raises(TypeError, match="Sharding' object is not callable"):
        rows.device()


def test_without_a_call_it_is_the_device_too():
    first, second = jax.devices()[:2]
    device = jax.device_put(X, second).device
    assert device == second == device == SingleDeviceSharding(second)
    assert device != first
    assert device in {second}
    assert device not in [first]
    assert (str(device), repr(device), device.platform, device.id) == (str(second), repr(second), "cpu", second.id)
    with pytest.raises(AttributeError):  # in jax's words, which are empty
        device.nothing  # noqa: B018  # an attribute that devices lack


def test_jax_accepts_it_for_a_device():
    device = jax.device_put(X, jax.devices()[1]).device
    assert jax.device_put(X, device).devices() == jnp.zeros(2, device=device).devices() == {device()}
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(2 * jax.device_put(x, device))))(jax.device_put(X, device))
    assert gradient.tolist() == [2, 2, 2]
    with jax.default_device(device()):
        assert jnp.ones(2).device == device
