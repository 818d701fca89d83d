"""levanter's checkpoints of Llamas to runs: its arrays under the names of Hugging Face's folders.

A checkpoint has no configuration: `config=` names a folder with the model's config.json. Modules have the names of
Hugging Face's; matrices have their outputs first, with an axis for groups of heads, heads and the size of a head.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardformer.convert import hf
from shardformer.convert.hf_settings import PublishedModel
from shardformer.convert.maxtext import read_options
from shardformer.convert.orbax_folder import OCDBT, Arrays, require_tensorstore
from shardformer.convert.tensors import Computed
from shardformer.errors import RunError, UsageError
from shardformer.files import read_bytes
from shardformer.messages import log

T = TypeVar("T")
METADATA, MODEL = "metadata.json", "model"  # the second folder has the parameters; others have the optimizer's state
DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # by the file that describes an array
OUTSIDE = {
    "embeddings.token_embeddings.weight": "model.embed_tokens.weight",
    "transformer.norm.weight": "model.norm.weight",
}
_LAYERS = re.compile(r"transformer\.layers\.(?:stacked|blocks\.(\d{1,6}))\.(.+)")


def find_checkpoint(folder: Path) -> Path | None:
    """Returns a checkpoint's folder of parameters, or that of the newest complete step in a folder."""
    return next((each / MODEL for each in [folder, *_list_steps(folder)] if _is_complete(each)), None)


def _list_steps(folder: Path) -> list[Path]:
    """Returns the folders of the steps, the newest first."""
    steps = [step for step in folder.glob("step-*") if step.name[5:].isdecimal()]
    return sorted(steps, key=lambda step: int(step.name[5:]), reverse=True)


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / METADATA).is_file() and (checkpoint / MODEL).is_dir()


def levanter_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    folder, words = read_options(source, arguments, "levanter")
    arrays = FoldersOfArrays(find_checkpoint(source) or source)
    log.info(f"{arrays.folder.parent} is read{_describe_skipped(source, arrays.folder.parent)}")
    result = hf.model_to_run(folder, target, words, [], arrays.folder, functools.partial(find_tensors, arrays))
    return f"{result}{_describe_zeros(arrays.zeros)}"


def _describe_skipped(source: Path, read: Path) -> str:
    """Names the newest step of a folder, if it is incomplete and another is read."""
    steps = _list_steps(source)
    newest = steps[0] if read in steps else read
    return "" if newest == read else f", as {newest.name}, which is newer, lacks {METADATA} or {MODEL}"


def _describe_zeros(names: set[str]) -> str:
    """Returns a line that warns of arrays of zeros: JAX stores none of their values, so that a lost array is one."""
    if not names:
        return ""
    return f"\nwarning: {len(names)} arrays are all zero, or were lost, {min(names)} first"


class FoldersOfArrays(Arrays):
    """The arrays below a folder: each in its own folder or, as JAX writes them now, in an OCDBT store per module."""

    def __init__(self, folder: Path):
        require_tensorstore(folder)
        self.folder, self._stores = folder, _index(folder, _list_stores(folder.absolute()))
        self.names = list(self._stores)
        self.zeros: set[str] = set()  # of the arrays that were read
        self.open = functools.cache(self._open)

    def _describe(self, name: str) -> dict[str, Any]:
        driver, store = self._stores[name]
        return {"driver": driver, "kvstore": store, "fill_missing_data_reads": True}  # chunks of zeros are left out


def _index(folder: Path, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Returns the pairs (name of an array, value) as a dictionary; raises RunError for a name that comes twice."""
    result: dict[str, T] = {}
    for name, value in pairs:
        if name in result:
            raise RunError(f"{folder} has two arrays with the name {name:.100}; remove the folder of one of them")
        result[name] = value
    return result


def _join_names(folder: Path, parts: Sequence[str]) -> str:
    """Returns the name of an array in a folder; raises RunError if it has none."""
    if not any(parts):
        raise RunError(f"{folder} is itself an array, expected a folder of each array; copy it again")
    return ".".join(parts)


def _check_path(path: Path) -> None:
    """Raises RunError for a path that is not UTF-8: tensorstore takes no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise RunError(f"the path {str(path)!a:.200} is not UTF-8; rename its folders") from None


def _is_group(path: Path) -> bool:
    """Returns whether a file of zarr 3 describes a folder of arrays, which writers may add."""
    try:
        described = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return False  # tensorstore explains it
    return isinstance(described, dict) and described.get("node_type") == "group"


def _list_stores(folder: Path) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """Lists the name of each array with its driver and the store that it is in."""
    for file, driver in DRIVERS.items():
        for path in sorted(folder.rglob(file)):
            _check_path(path)
            if not (driver == "zarr3" and _is_group(path)):
                name = _join_names(folder, path.parent.relative_to(folder).parts)
                yield name, (driver, {"driver": "file", "path": f"{path.parent}/"})
    for path in sorted(folder.rglob(OCDBT)):
        _check_path(path)
        store = {"driver": "ocdbt", "base": f"file://{path.parent}/"}
        for key in _list_keys(path.parent, store):
            place, _, file = key.rpartition("/")
            if place and file in DRIVERS:
                name = _join_names(folder, (*path.parent.relative_to(folder).parts, *place.split("/")))
                yield name, (DRIVERS[file], store | {"path": f"{place}/"})


def _list_keys(folder: Path, store: dict[str, Any]) -> list[str]:
    import tensorstore

    try:
        return [key.decode() for key in tensorstore.KvStore.open(store).result().list().result()]
    except (ValueError, OSError) as error:  # tensorstore's
        raise RunError(f"{folder} cannot be read: {str(error).partition(' [')[0]:.200}; copy it again") from None


def find_tensors(arrays: FoldersOfArrays, model: PublishedModel) -> dict[str, Computed]:
    """Returns the parameters as a Hugging Face folder of this model has them."""
    if model.family != "llama":
        raise UsageError(
            f"{arrays.folder}: of levanter's models llama is read, got {model.family}; export it by its "
            "export_lm_to_hf.py, and convert that folder"
        )
    tensors = (tensor for name in arrays.names for tensor in _split_layers(arrays, name, model))
    return _index(arrays.folder, ((tensor.name, tensor) for tensor in tensors))


def _split_layers(arrays: FoldersOfArrays, name: str, model: PublishedModel) -> Iterator[Computed]:
    """Lists the arrays of single layers in one of levanter's; an unknown one keeps its name."""
    array, place = arrays.open(name), _LAYERS.fullmatch(name)
    shape, dtype, layers = tuple(array.shape), array.dtype.numpy_dtype, model.config.model.layers
    if not place or place[1]:
        theirs = f"model.layers.{place[1]}.{place[2]}" if place else OUTSIDE.get(name, name)
        seen = _flatten(theirs, shape)
        yield Computed(arrays.folder, theirs, dtype, seen, functools.partial(_read, arrays, name, ..., seen))
        return
    if shape[:1] != (layers,):
        raise UsageError(
            f"{arrays.folder}: {name} is {list(shape)}, and axis 0 has the {layers} layers of config.json; give "
            "another config="
        )
    for layer in range(layers):
        theirs = f"model.layers.{layer}.{place[2]}"
        seen = _flatten(theirs, shape[1:])
        yield Computed(arrays.folder, theirs, dtype, seen, functools.partial(_read, arrays, name, layer, seen))


def _flatten(theirs: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an array in torch: [outputs, inputs] of a matrix, one axis of others."""
    if len(shape) < 2 or not theirs.endswith(".weight"):
        return (math.prod(shape),)
    inputs = 2 if theirs.endswith("o_proj.weight") and len(shape) > 2 else 1  # heads, and the size of one
    return math.prod(shape[:-inputs]), math.prod(shape[-inputs:])


def _read(arrays: FoldersOfArrays, name: str, layer: Any, shape: tuple[int, ...]) -> np.ndarray:
    values = arrays.read(name, (layer,)).reshape(shape)
    if not values.any():
        arrays.zeros.add(name if layer is ... else f"{name} of layer {layer}")
    return values
