"""Checks a user's shard function against a dense one on two or more meshes, and describes what differs.

No device takes part: a mesh may have any size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.analysis import diagnosis, verify
from shardformer.analysis.shard_runs import ShardRun, make_mesh, name_path, run_on_shards, split_tree


def verify_function(
    shard_function: Callable, dense_function: Callable, arguments: tuple, in_specs: tuple, out_specs: Any,
    meshes: Sequence[Mapping[str, int]],
) -> list[str]:  # fmt: skip
    """Returns one sentence for each mistake of `shard_function`; none if it equals `dense_function` on each mesh.

    Compares what every device returned, and names a psum that is missing or one too many, a wrong axis, a bias added
    before the sum, ..., and the line where one psum makes the outputs right. Then, if the functions take (parameters,
    batch) and return one loss, it compares the gradients. No device is needed.

    >>> import numpy as np
    >>> from jax import lax
    >>> from jax.sharding import PartitionSpec as P
    >>> from shardformer import verify_function
    >>> def dense(x, w):
    ...     return x @ w
    >>> def on_shard(x, w):
    ...     return lax.psum(x @ w, "mp")
    >>> draw = np.random.default_rng(0).normal
    >>> arguments = draw(size=(8, 4)).astype("f"), draw(size=(4, 2)).astype("f")
    >>> specs, meshes = (P("dp", "mp"), P("mp")), [{"dp": 4, "mp": 2}]
    >>> verify_function(on_shard, dense, arguments, specs, P("dp"), meshes)
    []
    >>> verify_function(dense, dense, arguments, specs, P("dp"), meshes)[0]
    'on the mesh dp=4 mp=2: `result`: every device holds only its own part of a sum; ...'

    Arguments:
      shard_function: takes the blocks of one shard, and calls collectives over named axes.
      dense_function: takes the full arrays.
      arguments: the full arrays.
      in_specs, out_specs: those of `jax.shard_map`.
      meshes: the sizes of the axes of each mesh.
    """
    sentences = []
    for sizes in meshes:
        device_mesh = make_mesh(sizes)
        run = run_on_shards(shard_function, arguments, in_specs, device_mesh)
        expected = exact.run(dense_function, *arguments).outputs
        result = compare_outputs(run, expected, out_specs, arguments, in_specs, device_mesh)
        if result and (repair := find_repair(run, expected, out_specs, device_mesh)):
            result = [*result, f"{repair}."]
        if not result and len(arguments) == 2 and out_specs == P() and np.shape(expected) == ():
            result = _compare_gradients(shard_function, dense_function, arguments, in_specs, device_mesh)
        on = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        sentences += [f"on the mesh {on}: {sentence}" for sentence in result]
    return sentences


def compare_outputs(
    run: ShardRun, expected: Any, out_specs: Any, arguments: tuple, in_specs: tuple, device_mesh,
    names: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Returns one sentence for each wrong output of a run; `names` are those of the arguments."""
    sizes = dict(device_mesh.shape)
    named = dict(zip(names, arguments, strict=True)) if names else arguments
    specs = dict(zip(names, in_specs, strict=True)) if names else in_specs
    blocks = split_tree(named, specs, device_mesh)
    right = split_tree(expected, out_specs, device_mesh)
    got = {name_path(path): leaf for path, leaf in jax.tree.leaves_with_path(run.outputs)}
    if got.keys() != right.keys():
        return [f"the shard function returns {list(got)}; expected {list(right)}."]
    shapes = {name_path(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(expected)}
    result = [diagnosis.diagnose(name, got[name], right[name], shapes[name], sizes, blocks) for name in right]
    return [sentence for sentence in result if sentence]


def find_repair(run: ShardRun, expected: Any, out_specs: Any, device_mesh) -> exact.Repair | None:
    """Returns the change of one line's sums over devices that makes every output of every device right."""
    right = list(split_tree(expected, out_specs, device_mesh).values())

    def is_right(changed: exact.Run) -> bool:
        return len(changed.outputs) == len(right) and all(map(diagnosis.equal, changed.outputs, right))

    return exact.find_repair(run.closed, run.leaves, is_right)


def _compare_gradients(shard_function: Callable, dense_function: Callable, arguments, in_specs, device_mesh) -> list:
    """Names the gradients of the first argument that differ, where a function defines its own."""
    rows = verify.compare_functions(
        dense_function, shard_function, arguments[0], in_specs[0], arguments[1], in_specs[1], device_mesh, False
    )
    return [
        f"the gradient of `{row.name}` is off by {row.relative:.1e} of its norm; expected at most {row.allowed:.0e}."
        for row in rows
        if not row.passes
    ]
