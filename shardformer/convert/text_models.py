"""The model of text inside a model of text and images: its part of config.json, and its arrays."""

from typing import Any, NamedTuple

from shardformer.convert.weight_files import Tensor
from shardformer.errors import UsageError


class Wrapper(NamedTuple):
    """One `model_type` of text and images, of which only the model of text is read."""

    families: tuple[str, ...]  # of the model of text; the first one if config.json names none
    silent: tuple[str, ...]  # keys of the wrapper and of its vision model, which do not change logits of text
    fixed: tuple[tuple[str, Any], ...] = ()  # keys whose value the wrapper fixes, whatever its model of text has


TIED = "tie_word_embeddings"
_IMAGES = ("text_config", "vision_config", "image_token_index", "image_token_id")
WRAPPERS = {
    # It ties its own head, and does not bound its logits.
    "gemma3": Wrapper(
        ("gemma3_text",),
        (*_IMAGES, "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"),
        ((TIED, True), ("final_logit_softcapping", None)),
    ),
    "llama4": Wrapper(
        ("llama4_text",),
        (*_IMAGES, "boi_token_index", "eoi_token_index"),
        ((TIED, False),),
    ),
    # transformers ties by the wrapper's key unless the files have a head. The key of the text model is that of the
    # published files.
    "mistral3": Wrapper(
        ("mistral", "ministral3", "mistral4"),
        (
            *_IMAGES, "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
            TIED,
        ),
    ),
}  # fmt: skip
# Prefixes of the text model's arrays, of transformers 4 and 5, and the prefix in a model of text.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = (
    "vision_model.", "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
)  # fmt: skip


def find_text_config(theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text model: `theirs`, or its `text_config` with the token ids of both."""
    name = theirs.get("model_type")
    if not isinstance(name, str) or name not in WRAPPERS:
        return theirs
    wrapper, text = WRAPPERS[name], theirs.get("text_config")
    family = text.get("model_type", wrapper.families[0]) if isinstance(text, dict) else None
    if not isinstance(text, dict) or family not in wrapper.families:
        raise UsageError(
            f"text_config={text!r:.80} is not computed here; expected an object of model_type="
            f"{' or '.join(wrapper.families)}"
        )
    for key, expected in wrapper.fixed:
        for config in (theirs, text):
            if config.get(key, expected) != expected:
                raise UsageError(f"{key}={config[key]!r:.80} is not computed in a {name}; expected {expected!r}")
    if theirs.get(TIED) is False and text.get(TIED) is True:  # transformers would use a head that the files may have
        raise UsageError(f"{TIED}=False of {name} contradicts {TIED}=True of its text_config; give both the same value")
    silent = {*wrapper.silent, *dict(wrapper.fixed)}
    outer = {key: value for key, value in theirs.items() if key not in silent}
    return outer | text | {"model_type": family} | {key: outer[key] for key in outer if key.endswith("_token_id")}


def select_text_arrays(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the arrays of the text model under the names of a model of text, or all arrays without a wrapper."""
    result, is_wrapped = {}, any(name.startswith(tuple(_PREFIXES)) for name in tensors)
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        if not (is_wrapped and name.startswith(_OTHER_PARTS)):
            result[_PREFIXES[prefix] + name.removeprefix(prefix) if prefix else name] = tensor
    return result
