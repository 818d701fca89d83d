"""Orbax's checkpoints: arrays in zarr, of one OCDBT store or of a folder each, read by tensorstore when needed."""

import contextlib
import functools
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardformer.errors import RunError, UsageError
from shardformer.files import read_bytes

METADATA, OCDBT = "_METADATA", "manifest.ocdbt"
ITEMS = ("items", "default", "state")  # of a step: the names that MaxText and Orbax's managers give to the state
MAX_METADATA = 2**26
CACHE = 2**32  # bytes of decoded chunks; a chunk often has all layers, which are read one by one


def find_state(folder: Path) -> Path | None:
    """Returns the folder with the arrays of a checkpoint, of a step's folder, or of the newest step in a folder."""
    steps = sorted((step for step in folder.glob("[0-9]*") if step.name.isdecimal()), key=lambda step: int(step.name))
    candidates = [place / item for place in (folder, *reversed(steps)) for item in ("", *ITEMS)]
    return next((place for place in candidates if (place / METADATA).is_file()), None)


def require_tensorstore(folder: Path) -> None:
    if importlib.util.find_spec("tensorstore") is None:
        raise UsageError(f"{folder} has arrays of tensorstore, which is missing: pip install 'shardformer[orbax]'")


class Arrays:
    """The arrays of a checkpoint by name, such as `params.params.decoder.decoder_norm.scale`."""

    def __init__(self, folder: Path):
        require_tensorstore(folder)
        self.folder = folder
        try:
            described = json.loads(read_bytes(folder / METADATA, MAX_METADATA))
            self._driver = "zarr3" if described.get("use_zarr3") else "zarr"
            # Without this flag, chunks of zeros were left out; with it, one that is missing was lost.
            self._is_complete = bool(described.get("store_array_data_equal_to_fill_value"))
            self.names = [_join_keys(leaf) for leaf in described["tree_metadata"].values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{folder / METADATA} does not list arrays ({error!s:.100}); copy it again") from None
        self.open = functools.cache(self._open)

    def _describe(self, name: str) -> dict[str, Any]:
        """Returns tensorstore's description of the array of this name."""
        folder = self.folder.absolute()
        store = {"driver": "file", "path": f"{folder}/{name}/"}
        if (folder / OCDBT).is_file():
            store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
        return {"driver": self._driver, "kvstore": store, "fill_missing_data_reads": not self._is_complete}

    def _open(self, name: str) -> Any:
        """Returns tensorstore's array of this name, not yet read."""
        import tensorstore

        spec = self._describe(name) | {"recheck_cached_data": False}
        with self._explain(name):
            array: Any = tensorstore.open(spec, open=True, read=True, context=self._context).result()
        chunk = array.chunk_layout.read_chunk.shape or ()  # None of a scalar
        if math.prod(chunk) > max(math.prod(array.shape), 1):  # it would be allocated
            raise RunError(f"{self.folder}: {name:.100} is {list(array.shape)} in chunks of {list(chunk)}: damaged")
        return array

    @functools.cached_property
    def _context(self) -> Any:
        import tensorstore

        return tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE}})

    def read(self, name: str, index: tuple) -> np.ndarray:
        """Reads the values at an index of slices and numbers."""
        array = self.open(name)
        with self._explain(name):
            return array[index].read().result()

    @contextlib.contextmanager
    def _explain(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:  # tensorstore's
            raise RunError(f"{self.folder}: {name:.100} cannot be read: {str(error).partition(' [')[0]:.200}") from None


def _join_keys(leaf: dict) -> str:
    name = ".".join(str(key["key"]) for key in leaf["key_metadata"])
    name.encode()  # tensorstore takes no other text
    return name
