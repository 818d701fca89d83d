"""levanter's checkpoints of Llamas to runs: its arrays under the names of Hugging Face's folders.

A checkpoint has no configuration: `config=` names a folder with the model's config.json. Modules have the names of
Hugging Face's; matrices have their outputs first, with an axis for groups of heads, heads and the size of a head.
"""

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardformer.convert import hf
from shardformer.convert.hf_settings import PublishedModel
from shardformer.convert.maxtext import read_options
from shardformer.convert.orbax_folder import OCDBT, Arrays, require_tensorstore
from shardformer.convert.tensors import Computed
from shardformer.errors import RunError, UsageError

METADATA, MODEL = "metadata.json", "model"  # the second folder has the parameters; others have the optimizer's state
DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # by the file that describes an array
OUTSIDE = {
    "embeddings.token_embeddings.weight": "model.embed_tokens.weight",
    "transformer.norm.weight": "model.norm.weight",
}
_LAYERS = re.compile(r"transformer\.layers\.(?:stacked|blocks\.(\d{1,6}))\.(.+)")


def find_checkpoint(folder: Path) -> Path | None:
    """Returns a checkpoint's folder of parameters, or that of the newest step in a folder."""
    steps = [step for step in folder.glob("step-*") if step.name[5:].isdecimal()]
    candidates = [folder, *sorted(steps, key=lambda step: int(step.name[5:]), reverse=True)]
    return next((each / MODEL for each in candidates if (each / METADATA).is_file() and (each / MODEL).is_dir()), None)


def levanter_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    folder, words = read_options(source, arguments, "levanter")
    arrays = FoldersOfArrays(find_checkpoint(source) or source)
    return hf.model_to_run(folder, target, words, [], arrays.folder, functools.partial(find_tensors, arrays))


class FoldersOfArrays(Arrays):
    """The arrays below a folder: each in its own folder or, as JAX writes them now, in an OCDBT store per module."""

    def __init__(self, folder: Path):
        require_tensorstore(folder)
        self.folder, self._stores = folder, dict(_list_stores(folder.absolute()))
        self.names = list(self._stores)
        self.open = functools.cache(self._open)

    def _describe(self, name: str) -> dict[str, Any]:
        driver, store = self._stores[name]
        return {"driver": driver, "kvstore": store, "fill_missing_data_reads": True}  # chunks of zeros are left out


def _list_stores(folder: Path) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """Lists the name of each array with its driver and the store that it is in."""
    for file, driver in DRIVERS.items():
        for path in sorted(folder.rglob(file)):
            name = ".".join(path.parent.relative_to(folder).parts)
            yield name, (driver, {"driver": "file", "path": f"{path.parent}/"})
    for path in sorted(folder.rglob(OCDBT)):
        store = {"driver": "ocdbt", "base": f"file://{path.parent}/"}
        for key in _list_keys(path.parent, store):
            place, _, file = key.rpartition("/")
            if place and file in DRIVERS:
                name = ".".join((*path.parent.relative_to(folder).parts, *place.split("/")))
                yield name, (DRIVERS[file], store | {"path": f"{place}/"})


def _list_keys(folder: Path, store: dict[str, Any]) -> list[str]:
    import tensorstore

    try:
        return [key.decode() for key in tensorstore.KvStore.open(store).result().list().result()]
    except (ValueError, OSError) as error:  # tensorstore's
        raise RunError(f"{folder} cannot be read: {str(error).partition(' [')[0]:.200}; copy it again") from None


def find_tensors(arrays: Arrays, model: PublishedModel) -> dict[str, Computed]:
    """Returns the parameters as a Hugging Face folder of this model has them."""
    if model.family != "llama":
        raise UsageError(
            f"{arrays.folder}: of levanter's models llama is read, got {model.family}; export it by its "
            "export_lm_to_hf.py, and convert that folder"
        )
    return {tensor.name: tensor for name in arrays.names for tensor in _split_layers(arrays, name, model)}


def _split_layers(arrays: Arrays, name: str, model: PublishedModel) -> Iterator[Computed]:
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


def _read(arrays: Arrays, name: str, layer: Any, shape: tuple[int, ...]) -> np.ndarray:
    return arrays.read(name, (layer,)).reshape(shape)
