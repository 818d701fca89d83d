"""The files of weights in a Hugging Face folder: safetensors, PyTorch's or Flax's; one file, or more with an index."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardformer.convert import flax_files, safetensors_files, torch_files
from shardformer.convert.safetensors_files import MAX_HEADER, parse_json
from shardformer.convert.tensors import Tensor
from shardformer.errors import RunError, UsageError
from shardformer.files import read_bytes

__all__ = ["Tensor", "find_tensors"]
_OTHER = re.compile(r".*\.(bin|pt|pth|ckpt|h5)")


class Format(NamedTuple):
    """The names of one format's files."""

    single_file: str
    index_file: str
    pattern: re.Pattern
    read: Callable[[Path], dict[str, Tensor]]
    rename: Callable[[str], str] = str  # the name that `read` gives to an array of the index


FORMATS = (
    Format(
        "model.safetensors",
        "model.safetensors.index.json",
        re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors"),
        safetensors_files.read_header,
    ),
    Format(
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.bin"),
        torch_files.read_torch_file,
    ),
    Format(
        "flax_model.msgpack",
        "flax_model.msgpack.index.json",
        re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.msgpack"),
        flax_files.read_flax_file,
        flax_files.to_torch_name,
    ),
)


def has_weights(path: Path) -> bool:
    """Tells whether a path is a file of weights, or a folder with such files."""
    names = [path.name, *(inside.name for inside in path.iterdir())] if path.is_dir() else [path.name]
    return any(format.pattern.fullmatch(name) for format in FORMATS for name in names)


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all arrays of a folder, or of one file, by name and not yet read."""
    for format in FORMATS:
        if format.pattern.fullmatch(folder.name) and not folder.is_dir():
            return format.read(folder)
        if (folder / format.single_file).is_file():  # before an index, as transformers does
            return format.read(folder / format.single_file)
        if (folder / format.index_file).is_file():
            return _find_by_index(folder, format)
    expected = " or ".join(f"{format.single_file} ({format.index_file})" for format in FORMATS)
    if rest := [path.name for path in sorted(folder.iterdir()) if _OTHER.fullmatch(path.name)]:
        raise UsageError(
            f"{folder / rest[0]} is in a format that is not read; expected {expected}: save the model again with "
            "save_pretrained(FOLDER, safe_serialization=True)"
        )
    raise UsageError(f"{folder} has no weights: expected {expected}")


def _find_by_index(folder: Path, format: Format) -> dict[str, Tensor]:
    stored = _read_index(folder / format.index_file, format)
    places = {format.rename(name): file for name, file in stored.items()}
    files = {file: format.read(folder / file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise RunError(f"{folder / format.index_file}: {name!r:.100} is not in {file}; copy the folder again")
    return {name: files[file][name] for name, file in places.items()}


def _read_index(path: Path, format: Format) -> dict[str, str]:
    try:
        content = parse_json(path, read_bytes(path, MAX_HEADER))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise RunError(f"{path} is damaged: weight_map is not an object of names and files")
    for file in places.values():
        if not format.pattern.fullmatch(file):
            suffix = format.single_file.rpartition(".")[2]
            raise UsageError(f"{path} names {file!r:.100}: a file of the index lies in its own folder, NAME.{suffix}")
    return places
