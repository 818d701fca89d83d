"""Runs a function of one shard on a mesh and keeps what every device returned, to compare it with a dense result."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.analysis.program_collectives import Collective, parse_collectives
from shardformer.devices import programs
from shardformer.errors import UsageError


class ShardRun(NamedTuple):
    """The outputs of every device, with the mesh's axes before the block's: [*mesh, *block]; and the collectives."""

    outputs: Any
    collectives: list[Collective]


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the first devices with these axes; raises UsageError if there are fewer."""
    shape = tuple(sizes.values())
    if (needed := math.prod(shape)) > jax.device_count():
        raise UsageError(
            f"a mesh of {dict(sizes)} needs {needed} devices, got {jax.device_count()}; for CPU devices, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX starts"
        )
    if needed > 1 and jax.default_backend() == "cpu":
        programs.disable_cache(programs.WRONG_WHEN_LOADED)  # the functions may have collectives in loops
    devices = np.array(jax.devices()[:needed]).reshape(shape)
    return Mesh(devices, tuple(sizes))


def run_on_shards(function: Callable, arguments: tuple, in_specs: tuple, device_mesh: Mesh) -> ShardRun:
    """Runs `function` under shard_map without its checks, which would reject a wrong program before it has results."""
    axes = device_mesh.axis_names

    def keep_each(*blocks):
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, range(len(axes))), function(*blocks))

    mapped = jax.shard_map(keep_each, mesh=device_mesh, in_specs=in_specs, out_specs=P(*axes), check_vma=False)
    placed = jax.device_put(arguments, match_shardings(arguments, in_specs, device_mesh))
    compiled = jax.jit(mapped).lower(*placed).compile()
    outputs = jax.tree.map(np.asarray, compiled(*placed))
    return ShardRun(outputs, parse_collectives(compiled.as_text() or ""))


def match_shardings(values: Any, specs: Any, device_mesh: Mesh) -> Any:
    """Returns a sharding for each array of `values`; a spec stands for all arrays below its path, as in shard_map."""
    shardings = jax.tree.map(lambda spec: NamedSharding(device_mesh, spec), specs, is_leaf=_is_spec)
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), shardings, values)


def split_tree(values: Any, specs: Any, device_mesh: Mesh) -> dict[str, np.ndarray]:
    """Returns {path: the block of each device, [*mesh, *block]}."""
    shardings = match_shardings(values, specs, device_mesh)
    pairs = zip(jax.tree.leaves_with_path(values), jax.tree.leaves(shardings), strict=True)
    return {name_path(path): split_blocks(leaf, sharding.spec, device_mesh) for (path, leaf), sharding in pairs}


def name_path(path: tuple) -> str:
    """Returns 'layers/w' for the path of a leaf; 'result' for a tree that is one leaf."""
    parts = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path]
    return "/".join(parts) or "result"


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def split_blocks(full: np.ndarray, spec: P, device_mesh: Mesh) -> np.ndarray:
    """Returns the block of each device, [*mesh, *block]."""
    full = np.asarray(full)
    slices = NamedSharding(device_mesh, spec).devices_indices_map(full.shape)
    blocks = [full[slices[device]] for device in device_mesh.devices.flat]
    return np.stack(blocks).reshape(*device_mesh.devices.shape, *blocks[0].shape)


def subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the nonempty subsets of the axes, the smallest first."""
    return [chosen for size in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, size)]
