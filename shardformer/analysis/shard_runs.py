"""Runs a function of one shard on a mesh and keeps what every device returned, to compare it with a dense result.

The exact interpreter runs it, without devices. It rounds as the program does, so that an overflow is one.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.analysis.program_collectives import Collective, describe_sent
from shardformer.exact import jaxprs, lockstep


class ShardRun(NamedTuple):
    """The outputs of every device, with the mesh's axes before the block's: [*mesh, *block]; and the collectives."""

    outputs: Any
    collectives: list[Collective]
    closed: Any  # the traced program
    leaves: list  # its arguments


def make_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Returns a mesh with these axes, without devices."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def run_on_shards(function: Callable, arguments: tuple, in_specs: tuple, device_mesh: Mesh | AbstractMesh) -> ShardRun:
    """Runs `function` under shard_map without its checks, which would reject a wrong program before it has results."""
    axes = device_mesh.axis_names

    def keep_each(*blocks):
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, range(len(axes))), function(*blocks))

    mapped = jax.shard_map(keep_each, mesh=device_mesh, in_specs=in_specs, out_specs=P(*axes), check_vma=False)
    closed, shape = jax.make_jaxpr(mapped, return_shape=True)(*arguments)
    closed, leaves = closed.replace(jaxpr=jaxprs.drop_dead(closed.jaxpr)), jax.tree.leaves(arguments)
    run, sizes = exact.run_jaxpr(closed, leaves, floats="stored"), dict(device_mesh.shape)
    collectives = [describe_sent(sent, sizes) for sent in run.wire]
    return ShardRun(jax.tree.unflatten(jax.tree.structure(shape), run.outputs), collectives, closed, leaves)


def match_shardings(values: Any, specs: Any, device_mesh: Mesh | AbstractMesh) -> Any:
    """Returns a sharding for each array of `values`; a spec stands for all arrays below its path, as in shard_map."""
    shardings = jax.tree.map(lambda spec: NamedSharding(device_mesh, spec), specs, is_leaf=_is_spec)
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), shardings, values)


def split_tree(values: Any, specs: Any, device_mesh: Mesh | AbstractMesh) -> dict[str, np.ndarray]:
    """Returns {path: the block of each device, [*mesh, *block]}."""
    shardings = match_shardings(values, specs, device_mesh)
    result = zip(jax.tree.leaves_with_path(values), jax.tree.leaves(shardings), strict=True)
    return {name_path(path): split_blocks(leaf, sharding.spec, device_mesh) for (path, leaf), sharding in result}


def name_path(path: tuple) -> str:
    """Returns 'layers/w' for the path of a leaf; 'result' for a tree that is one leaf."""
    parts = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path]
    return "/".join(parts) or "result"


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def split_blocks(full: Any, spec: P, device_mesh: Mesh | AbstractMesh) -> np.ndarray:
    """Returns the block of each device, [*mesh, *block]; of a random key the block of its words."""
    is_key = isinstance(full, jax.Array) and jax.dtypes.issubdtype(full.dtype, jax.dtypes.prng_key)
    full, sizes = np.asarray(jax.random.key_data(full) if is_key else full), dict(device_mesh.shape)
    blocks = lockstep.split(full, full.ndim, spec, sizes)
    return np.broadcast_to(blocks, (*sizes.values(), *blocks.shape[len(sizes) :]))


def subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the nonempty subsets of the axes, the smallest first."""
    return [chosen for size in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, size)]
