"""MaxText's checkpoints to runs: its arrays under the names and with the axes of Hugging Face's folders.

A checkpoint has no configuration: `config=` names a folder with the model's config.json. Layers are an axis of each
array, the second one, or arrays of their own.
"""

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardformer.config import parsing
from shardformer.convert import hf, hf_settings, orbax_folder
from shardformer.convert.convert_options import FromMaxtext
from shardformer.convert.hf_settings import PublishedModel
from shardformer.convert.tensors import Computed
from shardformer.errors import UsageError

PARAMETERS = "params.params."  # others are the optimizer's
_LAYERS = re.compile(r"decoder\.layers(?:_(\d{1,6}))?\.(.+)")
OUTSIDE = {
    "token_embedder.embedding": "model.embed_tokens.weight",
    "decoder.decoder_norm.scale": "model.norm.weight",
    "decoder.logits_dense.kernel": "lm_head.weight",
}
LAYER = {
    "pre_self_attention_layer_norm.scale": "input_layernorm.weight",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm.weight",
    "self_attention.query.kernel": "self_attn.q_proj.weight",
    "self_attention.key.kernel": "self_attn.k_proj.weight",
    "self_attention.value.kernel": "self_attn.v_proj.weight",
    "self_attention.out.kernel": "self_attn.o_proj.weight",
    "self_attention.query.bias": "self_attn.q_proj.bias",
    "self_attention.key.bias": "self_attn.k_proj.bias",
    "self_attention.value.bias": "self_attn.v_proj.bias",
    "self_attention.query_norm.scale": "self_attn.q_norm.weight",
    "self_attention.key_norm.scale": "self_attn.k_norm.weight",
    "mlp.wi_0.kernel": "mlp.gate_proj.weight",
    "mlp.wi_1.kernel": "mlp.up_proj.weight",
    "mlp.wo.kernel": "mlp.down_proj.weight",
}
MIXTRAL = LAYER | {
    "MoeBlock_0.gate.kernel": "block_sparse_moe.gate.weight",
    "MoeBlock_0.wi_0": "block_sparse_moe.experts.{}.w1.weight",
    "MoeBlock_0.wi_1": "block_sparse_moe.experts.{}.w3.weight",
    "MoeBlock_0.wo": "block_sparse_moe.experts.{}.w2.weight",
}
QWEN_EXPERTS = LAYER | {
    "moe_block.gate.kernel": "mlp.gate.weight",
    "moe_block.wi_0": "mlp.experts.{}.gate_proj.weight",
    "moe_block.wi_1": "mlp.experts.{}.up_proj.weight",
    "moe_block.wo": "mlp.experts.{}.down_proj.weight",
}
NAMES = {
    "llama": LAYER, "mistral": LAYER, "qwen2": LAYER, "qwen3": LAYER, "mixtral": MIXTRAL, "qwen3_moe": QWEN_EXPERTS,
}  # fmt: skip
SCALED = ("llama", "mistral", "mixtral")  # families whose queries are stored divided by the root of a head's size
ROTARY = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


class _Slice(NamedTuple):
    """A part of one of MaxText's arrays, under Hugging Face's name."""

    theirs: str
    name: str
    shape: tuple[int, ...]  # of the part, with MaxText's axes
    expert: int | None = None
    layer: int | None = None  # of an array of all layers, in which it is the second axis

    @property
    def shape_in_torch(self) -> tuple[int, ...]:
        """[outputs, inputs] of a matrix; a bias has one axis."""
        if not self.is_matrix:
            return (math.prod(self.shape),) if self.theirs.endswith(".bias") else self.shape
        inputs = 2 if self.theirs.endswith("o_proj.weight") else 1  # heads, and the size of one
        return math.prod(self.shape[inputs:]), math.prod(self.shape[:inputs])

    @property
    def is_matrix(self) -> bool:
        return self.name.endswith((".kernel", ".wi_0", ".wi_1", ".wo"))


def maxtext_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    folder, words = read_options(source, arguments, "MaxText")
    arrays = orbax_folder.Arrays(orbax_folder.find_state(source) or source)
    return hf.model_to_run(folder, target, words, [], arrays.folder, functools.partial(find_tensors, arrays))


def read_options(source: Path, arguments: list[str], owner: str) -> tuple[Path, list[str]]:
    """Returns the folder with the configuration that a checkpoint of this owner lacks, and the other arguments."""
    options, words = parsing.parse_known_options(arguments, FromMaxtext)
    folder = Path(options.config)
    if not options.config or not hf_settings.is_hf_folder(folder):
        raise UsageError(
            f"{source} is a checkpoint of {owner}'s, which has no configuration; give config=FOLDER, a Hugging Face "
            f"folder with config.json and tokenizer of this model, got config={options.config}"
        )
    return folder, words


def find_tensors(arrays: orbax_folder.Arrays, model: PublishedModel) -> dict[str, Computed]:
    """Returns the parameters as a Hugging Face folder of this model has them."""
    if model.family not in NAMES:
        raise UsageError(
            f"{arrays.folder}: of MaxText's models {', '.join(NAMES)} are read, got {model.family}; save it by its "
            "to_huggingface.py, and convert that folder"
        )
    slices = [each for name in arrays.names if name.startswith(PARAMETERS) for each in _cut(arrays, name, model)]
    load = functools.lru_cache(maxsize=1)(functools.partial(_load, arrays, model))  # an array is read in blocks of rows
    return {
        each.theirs: Computed(
            arrays.folder,
            each.theirs,
            np.dtype(np.float32) if _is_scaled(each, model) else arrays.open(each.name).dtype.numpy_dtype,
            each.shape_in_torch,
            functools.partial(load, each),
        )
        for each in slices
    }


def _cut(arrays: orbax_folder.Arrays, name: str, model: PublishedModel) -> Iterator[_Slice]:
    """Lists the arrays of single layers and experts in one of MaxText's; an unknown one keeps its name."""
    short, shape = name.removeprefix(PARAMETERS), tuple(arrays.open(name).shape)
    place, names = _LAYERS.fullmatch(short), NAMES[model.family]
    if not place or place[2] not in names:
        yield _Slice(OUTSIDE.get(short, short), name, shape)
        return
    theirs, is_stacked, has_experts = names[place[2]], place[1] is None, "{}" in names[place[2]]
    layers, experts = model.config.model.layers, model.config.experts.experts
    for axis, size, what, is_there in ((1, layers, "layers", is_stacked), (0, experts, "experts", has_experts)):
        if is_there and shape[axis : axis + 1] != (size,):
            raise UsageError(
                f"{arrays.folder}: {name} is {list(shape)}, and axis {axis} has the {size} {what} of "
                f"{hf_settings.NAME}; give another config="
            )
    one = shape[:1] + shape[2:] if is_stacked else shape
    for layer in range(layers) if is_stacked else [None]:
        prefix = f"model.layers.{place[1] if layer is None else layer}."
        if has_experts:
            for expert in range(experts):
                yield _Slice(prefix + theirs.format(expert), name, one[1:], expert, layer)
        else:
            yield _Slice(prefix + theirs, name, one, None, layer)


def _load(arrays: orbax_folder.Arrays, model: PublishedModel, each: _Slice) -> np.ndarray:
    layer = () if each.layer is None else (each.layer,)
    values = arrays.read(each.name, (slice(None) if each.expert is None else each.expert, *layer))
    if each.theirs.endswith(ROTARY) and _has_pairs(model):
        values = np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1)
    if _is_scaled(each, model):
        values = values.astype(np.float32) * np.float32(math.sqrt(model.config.model.head_size))
    return values.reshape(each.shape_in_torch[::-1]).T if each.is_matrix else values.reshape(each.shape_in_torch)


def _is_scaled(each: _Slice, model: PublishedModel) -> bool:
    return model.family in SCALED and each.theirs.endswith("q_proj.weight")


def _has_pairs(model: PublishedModel) -> bool:
    """Returns whether rotary pairs are neighbours: in models whose frequencies are scaled as Llama 3.1's."""
    return model.config.model.rotary_scaling.startswith("llama3:")
