"""EasyLM's streamed checkpoints of Llama (Koala, OpenLLaMA, LWM) to a run.

A stream has no configuration: its arrays show the sizes, and `base_model=` names the rest, as it does for EasyLM. A
Llama's config.json in the same folder takes its place.
"""

import dataclasses
import re
from pathlib import Path

from shardformer.config import ARCHITECTURE, Config, parsing
from shardformer.convert import flax_files, hf, hf_settings, hf_state, runs
from shardformer.convert.easylm_options import BASE_MODELS, LLAMA_1, FromEasylm
from shardformer.convert.families.family import Family
from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.layout import Stored, neighbours, rename
from shardformer.convert.leaves import State
from shardformer.convert.new_folder import describe_form, describe_size, new_folder
from shardformer.convert.tensors import Tensor
from shardformer.data import SpecialTokens
from shardformer.errors import UsageError
from shardformer.training.run_folder import Run

UNSEEN = ("heads", "seq", "norm_eps", "rotary_theta")
# Llama's names, and EasyLM's with `weight` for `kernel`.
_NAMES = {
    r"model\.layers\.": "transformer.h.", r"model\.embed_tokens": "transformer.wte", r"model\.norm": "transformer.ln_f",
    r"self_attn\.(.)_proj": r"attention.w\1", r"mlp\.gate_proj": "feed_forward.w1", r"mlp\.up_proj": "feed_forward.w3",
    r"mlp\.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_SCANNED = "transformer.h.scan_decoder."  # LWM's layers, which are stacked


def _list_outside(c: Config) -> list[Stored]:
    return rename(LLAMA.outside(c), _NAMES)


def _list_layer(c: Config) -> list[Stored]:
    return rename(list_layer(c, neighbours), _NAMES)


EASYLM: Family = dataclasses.replace(LLAMA, outside=_list_outside, layer=_list_layer)


def easylm_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    options, rest = parsing.parse_known_options(arguments, FromEasylm)
    changes = parsing.parse_overrides(rest, Config)
    if "out" in changes:
        raise UsageError("the run's folder is DST; out= cannot name another")
    tensors = _unstack(flax_files.read_stream(source))
    config, special = _read_config(source, tensors, options.base_model, changes)
    config = hf.choose_tokenizer(source.parent, config.replace(out=str(target)))
    config, vocabulary, fingerprint = runs.open_vocabulary(config, special.first)
    matched = hf_state.match(source, "EasyLM", EASYLM, config, tensors)
    not_finite: set[str] = set()
    state = State(0, hf_state.fill_params(matched, config, not_finite))
    with new_folder(target) as temporary:
        runs.write_run(temporary, Run(config, vocabulary, fingerprint, special), state)
        hf.keep_tokenizer_files(source.parent, temporary)
    return (
        f"{target}: {describe_size(state.params)} of EasyLM's llama, {config.data.tokenizer} as its "
        f"tokenizer{describe_form(config)}{hf.describe_not_finite(not_finite)}"
    )


def _unstack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the arrays of single layers under PyTorch's names and with its axes."""
    result: dict[str, Tensor] = {}
    entries = 0
    for name, tensor in tensors.items():
        if not name.startswith(_SCANNED) or not tensor.shape:
            moved = flax_files.to_torch(tensor)
            result[moved.name] = moved
            continue
        entries += tensor.shape[0] * max(1, len(tensor.pieces))  # each layer lists all pieces
        if entries > flax_files.MAX_ENTRIES:  # layers without values take no bytes of the file
            raise UsageError(
                f"{tensor.path} has {tensor.shape[0]:,} layers in {name!r:.100}: the arrays of all layers are more "
                f"than the limit of {flax_files.MAX_ENTRIES:,}"
            )
        for layer in range(tensor.shape[0]):
            one = flax_files.to_torch(tensor.row(layer)._replace(name=f"transformer.h.{layer}.{name[len(_SCANNED) :]}"))
            result[one.name] = one
    return result


def _read_config(
    source: Path, tensors: dict[str, Tensor], base_model: str, changes: dict
) -> tuple[Config, SpecialTokens]:
    """Returns the model of config.json next to the file, else that of the arrays and of `base_model`."""
    if hf_settings.is_hf_folder(source.parent) and not base_model:
        model = hf_settings.read_model(source.parent)
        if model.family != "llama":
            raise UsageError(f"{source} is a Llama of EasyLM's, and {source.parent / hf_settings.NAME} is not one")
        config, special, said = model.config, model.special_tokens, f"{source.parent / hf_settings.NAME}, which has"
        free: tuple[str, ...] = ()
    else:
        config, special, said = _size_up(source, tensors, base_model, changes), SpecialTokens(), f"{source}, which has"
        free = UNSEEN
    for name in ARCHITECTURE:
        if name in changes and name not in free and changes[name] != config.get(name):
            raise UsageError(f"{name}={changes[name]} contradicts {said} {name}={config.shown(name)}")
    return config.replace(**changes), special


def _size_up(source: Path, tensors: dict[str, Tensor], base_model: str, changes: dict) -> Config:
    def find(name: str) -> tuple[int, int]:
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != 2 or 0 in shape:
            raise UsageError(
                f"{source} lacks the matrix {name} of EasyLM's llama; it has {', '.join(sorted(tensors))!s:.200}"
            )
        return shape[0], shape[1]

    unseen = BASE_MODELS.get(base_model, {}) | {name: changes[name] for name in UNSEEN if name in changes}
    if "heads" not in unseen:
        raise UsageError(
            f"{source} does not show the number of heads; give base_model=NAME, one of {', '.join(BASE_MODELS)}, or "
            "heads=, seq= and norm_eps="
        )
    (vocab, width), heads = find("transformer.wte.weight"), unseen["heads"]
    layers = len({name.split(".")[2] for name in tensors if re.match(r"transformer\.h\.\d+\.", name)})
    keys = find("transformer.h.0.attention.wk.weight")[0]
    if width % heads or keys % (width // heads):
        raise UsageError(
            f"heads={heads} does not divide the width {width} of {source}, or its keys' {keys}; give another base_model"
        )
    sizes = {"layers": layers, "d_model": width, "vocab": vocab, "kv_heads": keys // (width // heads)}
    sizes |= {"d_ff": find("transformer.h.0.feed_forward.w1.weight")[0], "tied": "lm_head.weight" not in tensors}
    return Config.of(**LLAMA.ours | {"activation": "swiglu", "vocab_multiple": 8} | LLAMA_1 | sizes | unseen)
