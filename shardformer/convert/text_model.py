"""The model of text inside a model of text and images: its part of config.json, and its arrays."""

from typing import Any

from shardformer.convert.weight_files import Tensor
from shardformer.errors import UsageError

# The keys that a wrapper may have, besides those of its vision model, which this package leaves out.
WRAPPERS = {
    "gemma3": (
        "text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
        "image_token_index", "image_token_id", "boi_token_id", "eoi_token_id", "tie_word_embeddings",
    ),
}  # fmt: skip
FAMILY_OF_TEXT = {"gemma3": "gemma3_text"}
# Prefixes of the text model's arrays, of transformers 4 and 5, and the prefix in a model of text.
PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
OTHER_PARTS = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
)  # fmt: skip


def find_text_config(theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text model: `theirs`, or its `text_config` with the token ids of both."""
    wrapper = theirs.get("model_type")
    if not isinstance(wrapper, str) or wrapper not in WRAPPERS:
        return theirs
    text, family = theirs.get("text_config"), FAMILY_OF_TEXT[wrapper]
    if not isinstance(text, dict) or text.get("model_type", family) != family:
        raise UsageError(f"text_config={text!r:.80} is not computed here; expected an object of model_type={family}")
    for key in ("tie_word_embeddings", "final_logit_softcapping"):
        # The wrapper ties its own head, and does not bound its logits whatever its text model says.
        expected = True if key == "tie_word_embeddings" else None
        for config in (theirs, text):
            if config.get(key, expected) != expected:
                raise UsageError(f"{key}={config[key]!r:.80} is not computed in a {wrapper}; expected {expected!r}")
    outer = {key: value for key, value in theirs.items() if key not in WRAPPERS[wrapper]}
    return outer | text | {"model_type": family} | {key: outer[key] for key in outer if key.endswith("_token_id")}


def select_text_arrays(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the arrays of the text model under the names of a model of text, or all arrays without a wrapper."""
    result, is_wrapped = {}, any(name.startswith(tuple(PREFIXES)) for name in tensors)
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        if not (is_wrapped and name.startswith(OTHER_PARTS)):
            result[PREFIXES[prefix] + name.removeprefix(prefix) if prefix else name] = tensor
    return result
