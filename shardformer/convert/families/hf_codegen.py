"""CodeGen: `CodeGenForCausalLM`, and ProGen2. GPT-J with queries, values and keys joined, as its TPU cores had them."""

import dataclasses
import functools

import numpy as np

from shardformer.config import Config
from shardformer.convert.families.hf_gptj import GPTJ
from shardformer.convert.families.layout import Part, Stored
from shardformer.errors import UsageError


def _show_shards(shards: int, ours: np.ndarray) -> np.ndarray:
    return ours.T.reshape(shards, -1, ours.shape[0])


def _read(theirs: dict, shards: int) -> dict:
    if theirs["n_head"] % shards:
        raise UsageError(
            f"n_head={theirs['n_head']!r:.80} is not computed here; expected a multiple of {shards}, over which the "
            "heads are stored"
        )
    return GPTJ.read(theirs)


def _layer(c: Config, shards: int) -> list[Stored]:
    D = c.model.d_model
    show = functools.partial(_show_shards, shards)
    parts = tuple(Part(name, show, (slice(None), i)) for i, name in enumerate("qvk"))
    joined = Stored("transformer.h.{}.attn.qkv_proj.weight", (3 * D, D), parts, seen=(shards, 3, D // shards, D))
    return [joined, *(stored for stored in GPTJ.layer(c) if stored.parts[0].ours not in ("q", "k", "v"))]


CODEGEN = dataclasses.replace(
    GPTJ,
    architecture="CodeGenForCausalLM",
    read=functools.partial(_read, shards=4),
    layer=functools.partial(_layer, shards=4),
)
# ProGen2 has no class in transformers. Its own code writes the size of the vocabulary two more times.
PROGEN = dataclasses.replace(
    CODEGEN,
    architecture="ProGenForCausalLM",
    read=functools.partial(_read, shards=8),
    layer=functools.partial(_layer, shards=8),
    silent=(*GPTJ.silent, "n_fea"),
)
