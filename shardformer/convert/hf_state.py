"""Conversion between a Hugging Face folder and full arrays under our names, a block or an array at a time."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from shardformer.config import Config
from shardformer.convert import baichuan, safetensors_files, weight_files
from shardformer.convert.convert_options import FLOAT_NAMES
from shardformer.convert.families import FAMILIES, Family, Part, Stored, list_arrays, list_stored
from shardformer.convert.families.layout import rename
from shardformer.convert.gptj import TABLE, TABLE_BIAS
from shardformer.convert.leaves import Filled, Leaves, Readable, blocks, flatten
from shardformer.convert.mxfp4 import Packed, unpack
from shardformer.convert.safetensors_files import CreatedTensor
from shardformer.convert.tensors import Computed, Tensor
from shardformer.convert.text_models import select_text_arrays
from shardformer.errors import RunError, UsageError
from shardformer.model.task_on_mesh import choose_task

Source = Tensor | Packed | Computed
MAX_FLOAT16 = 65504.0
FLOATS = {name: jnp.dtype(name) for name in FLOAT_NAMES}
# Masks, frequencies and factors that older versions of transformers saved; config.json determines them.
_DERIVED = re.compile(
    r"(.*\.)?(attn|attention)\.(attention\.)?(bias|masked_bias|sin|cos|scale_attn)|(.*\.)?rotary_emb\.inv_freq"
)


def find_tensors(folder: Path) -> Mapping[str, Source]:
    """Returns the arrays of the text model of a folder."""
    tensors = select_text_arrays(weight_files.find_tensors(folder))
    return baichuan.unpack_arrays(folder, tensors) if baichuan.is_packed(tensors) else unpack(tensors)


def open_params(
    folder: Path,
    family: str,
    config: Config,
    not_finite: set[str],
    positions: int = 0,
    tensors: Mapping[str, Source] | None = None,
) -> Leaves:
    """Returns the parameters of a folder, which are read when they are written elsewhere.

    not_finite: receives the names of arrays with NaN or infinity. positions: rows of a table of learned positions, of
    which the first config.seq are read; 0 means config.seq. tensors: the arrays, if they are not the folder's own.
    """
    published = config.replace(seq=positions or config.model.seq)
    tensors = find_tensors(folder) if tensors is None else tensors
    return fill_params(match(folder, family, FAMILIES[family], published, tensors), config, not_finite)


def fill_params(tensors: Sequence[tuple[Stored, Source]], config: Config, not_finite: set[str]) -> Leaves:
    """Returns the parameters that the arrays of a folder hold, which are read when they are written elsewhere."""
    sources: dict[str, list[tuple[Source, Stored, Part]]] = {}
    for stored, tensor in tensors:
        for part in stored.parts:
            sources.setdefault(part.ours, []).append((tensor, stored, part))

    def fill(name: str, whole: np.ndarray) -> None:
        whole[...] = 0  # the rows that pad the vocabulary
        for source in sources[name]:
            copy(source, whole if source[1].row is None else whole[source[1].row])

    def fill_row(name: str, target: np.ndarray, row: int) -> None:
        target[...] = 0
        for source in sources[name]:
            if source[1].row == row:
                copy(source, target)

    def copy(source: tuple[Source, Stored, Part], target: np.ndarray) -> None:
        if not _copy_part(*source, target):
            not_finite.add(source[1].name)

    def make(name: str, shape: tuple[int, ...]) -> Filled:
        is_stacked = sources[name][0][1].row is not None
        row = functools.partial(fill_row, name) if is_stacked else None
        return Filled(shape, np.dtype(np.float32), functools.partial(fill, name), row)

    task = choose_task(config.objective.as_language_model())  # without layers that only training has
    shapes = {name: leaf.shape for name, leaf in flatten(task.abstract_parameters(config)).items()}
    if shapes.keys() != sources.keys():
        raise RuntimeError(
            f"the arrays of the family and of the model differ: {sorted(shapes.keys() ^ sources.keys())}"
        )
    return {name: make(name, shape) for name, shape in shapes.items()}


def match(
    folder: Path, name: str, family: Family, config: Config, tensors: Mapping[str, Source]
) -> list[tuple[Stored, Source]]:
    """Pairs the arrays of the family of this name with those of the folder; rejects an array without a partner."""
    if config.model.layers > len(tensors):  # before all names are listed
        raise RunError(
            f"{folder} has {len(tensors)} arrays, fewer than the {config.model.layers} layers of its config.json"
        )
    left, result, missing = dict(tensors), [], []
    arrays = list_arrays(family, config)
    pairs = list(zip(arrays, rename(arrays, family.older_arrays), strict=True))
    is_older = any(older.name in left for stored, older in pairs if older.name != stored.name)
    for stored, older in pairs:
        short = stored.name.partition(".")[2]  # the name in a model that was saved without its head
        tensor = next((left.pop(one) for one in (stored.name, short, older.name) if one in left), None)
        if tensor is None:
            missing.append(older.name if is_older else stored.name)
            continue
        if tensor.shape != stored.shape:
            raise UsageError(
                f"{tensor.path}: {tensor.name} is {list(tensor.shape)}, and config.json makes it {list(stored.shape)}"
            )
        if tensor.dtype not in FLOATS.values():
            raise UsageError(f"{tensor.path}: {tensor.name} is {tensor.dtype}, expected one of {', '.join(FLOATS)}")
        result.append((stored, tensor))
    if missing:
        raise RunError(f"{folder} lacks {first_of(missing)}; copy all of its files again")
    tied = {"lm_head.weight", "embed_out.weight", "output_projection.weight"} if config.model.tied else set()
    if family.predicts_further:
        left = {array: tensor for array, tensor in left.items() if not _predicts_further(array, config.model.layers)}
    unknown = [array for array in left if array not in tied and not _DERIVED.fullmatch(array)]
    if unknown:
        raise UsageError(f"{folder} has {first_of(unknown)}, which no {name} model with this config.json has")
    return result


def _predicts_further(name: str, layers: int) -> bool:
    """Returns whether an array is of what follows the last layer, to predict later tokens."""
    number = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(number[1]) >= layers if number else name.startswith(("model.mtp_", "mtp."))


def first_of(names: list[str]) -> str:
    return f"{names[0]:.100}{f' and {len(names) - 1} more' if names[1:] else ''}"


def _copy_part(tensor: Source, stored: Stored, part: Part, target: np.ndarray) -> bool:
    """Copies one part of an array; returns whether all of its values are finite."""
    seen, view, finite = stored.seen or stored.shape, part.view(target), True
    if part.cut and isinstance(part.cut[0], int):
        view[...] = tensor.read(slice(part.cut[0], part.cut[0] + 1), seen)[0][part.cut[1:]]
        return bool(np.isfinite(view).all())
    if not part.cut:
        seen = (len(view), *seen[1:])  # a shorter context reads the first rows of a table of positions
    for rows in blocks(seen, tensor.dtype.itemsize):
        moved = slice(rows.start + stored.first, rows.stop + stored.first)
        block = tensor.read(moved, (seen[0] + stored.first, *seen[1:]))[part.cut]
        view[rows] = block
        finite &= bool(np.isfinite(block).all())
    return finite


def fold_embedding_bias(params: Leaves) -> Leaves:
    """Adds the bias of the embedding to each row of the token table, as the model does after the lookup."""
    if TABLE_BIAS not in params:
        return params
    table, bias = params[TABLE], np.asarray(params[TABLE_BIAS])

    def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds)
        return table[rows, columns] + bias[columns]

    folded = Readable(table.shape, table.dtype, read)
    return {name: leaf for name, leaf in params.items() if name != TABLE_BIAS} | {TABLE: folded}


def compute_array(params: Leaves, stored: Stored) -> np.ndarray:
    """Returns an array of a folder from our parameters."""

    def read(part: Part) -> np.ndarray:
        return part.view(np.asarray(params[part.ours][... if stored.row is None else stored.row]))

    if len(stored.parts) == 1 and not stored.seen and not stored.first:
        return read(stored.parts[0])  # not transposed: a table, the largest array, is copied in blocks
    seen = np.zeros(stored.seen or stored.shape, np.float32)
    for part in stored.parts:
        seen[stored.first :][part.cut] = read(part)
    return seen.reshape(stored.shape)


def check_float16(array: np.ndarray, name: str, instead: str) -> None:
    """Rejects an array with a value that float16 makes infinite; `instead` is another value of the key dtype."""
    if (largest := float(max(array.max(initial=0), -array.min(initial=0)))) > MAX_FLOAT16:
        raise UsageError(f"{name} has a weight of {largest:g}, too large for float16; give dtype={instead}")


def write_params(folder: Path, family: str, config: Config, params: Leaves, dtype: str, shard_bytes: int) -> None:
    kind = FLOATS[dtype]

    def make(stored: Stored) -> np.ndarray:
        array = compute_array(params, stored)
        if kind == np.float16:
            check_float16(array, stored.name, "bfloat16")
        return array

    arrays = [CreatedTensor(s.name, kind, s.shape, functools.partial(make, s)) for s in list_stored(family, config)]
    safetensors_files.write_tensors(folder, arrays, shard_bytes)
