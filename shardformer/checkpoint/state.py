"""A sharded state to disk and back onto any mesh; neither way does the host hold more than about one leaf.

Where several processes save, each leaf in turn is gathered whole on every device, for process 0 to write.
"""

from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardformer.checkpoint import folders, names, records
from shardformer.errors import RunError


def save(out: Path, step: int, state, documents: dict[str, str]) -> Path:
    """Writes `state` (jax.Arrays) and `documents` (file name -> text) as one checkpoint; every process must call it."""
    out = Path(out)
    leaves = names.flatten(state)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"leaf {name!r} is no plain jax.Array: {leaf!r}; store a key as jax.random.key_data(key)")
    arrays = (_on_host(leaf) for leaf in leaves.values())
    failure = None
    if jax.process_index() == 0:
        try:
            with folders.published(out, step) as folder:
                records.write(folder, records.layout_of(leaves), arrays)
                for name, text in documents.items():
                    (folder / name).write_text(text, encoding="utf-8")
        except RunError as error:
            failure = error
    for _ in arrays:  # gathering takes every process: also those that write nothing, also one that could not go on
        pass
    _agree(failure, out, step)
    return folders.folder(out, step)


def restore(folder: Path, like, without: tuple[str, ...] = ()):
    """The checkpoint as the tree `like` of jax.ShapeDtypeStructs, each leaf laid out by its `.sharding`.

    `without` names the parts of the state (its top level) that the caller can do without: a sampler, the optimizer.
    """
    folder = Path(folder)
    wanted = names.flatten(like)
    layout = records.read_layout(folder)
    _compare(folder, layout, records.layout_of(wanted), without)
    stored = records.Records(folder, layout)
    return names.unflatten(like, {name: _on_devices(stored.read(name), leaf) for name, leaf in wanted.items()})


def _on_host(leaf: jax.Array) -> np.ndarray:
    if leaf.is_fully_replicated:
        return _peek(leaf.addressable_data(0))
    if not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    whole = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = _peek(shard.data)
    return whole


def _peek(data: jax.Array) -> np.ndarray:
    """np.asarray, but an Array keeps the host copy made of it for all its life: a passing twin keeps this one."""
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def _on_devices(stored: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    # Each slice is copied: on the CPU an Array may use the numpy buffer itself, and the step that it is donated to
    # would then write into the file.
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.array(stored[index]))


def _compare(folder: Path, got: records.Layout, expected: records.Layout, without: tuple[str, ...]) -> None:
    """Every leaf wanted is there, as wanted, and nothing else but what the caller can do without."""
    problems = [f"leaf {name!r} is missing" for name in expected if name not in got]
    for name, (dtype, shape) in got.items():
        if name in expected:
            if (dtype, shape) != expected[name]:
                problems.append(f"leaf {name!r} is {_words(dtype, shape)}, expected {_words(*expected[name])}")
        elif name.partition("/")[0] not in without:
            problems.append(f"leaf {name!r} was not expected")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise RunError(
            f"{folder / records.TREE} does not fit this configuration: {'; '.join(problems[:3])}{more}; "
            "a checkpoint is restored with the config.json that lies in it"
        )


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype[:40]}[{','.join(map(str, shape))[:200]}]"


def _agree(failure: RunError | None, out: Path, step: int) -> None:
    """All processes wait until the checkpoint is there, and all fail if it is not."""
    if jax.process_count() > 1:
        failed = multihost_utils.broadcast_one_to_all(np.int32(failure is not None))
        if failed and failure is None:
            failure = RunError(
                f"process 0 could not write the checkpoint {folders.folder(out, step)}; its log says why"
            )
    if failure:
        raise failure
