"""Hugging Face's `...ForSequenceClassification` with one label: a model of rewards, as objective=reward trains it.

transformers keeps the model and replaces the vocabulary's head by `score.weight` [1, d_model], without caps or factors
of logits.
"""

import re
from typing import Any

from shardformer.config import FIELDS, Config
from shardformer.convert.families.family import Family
from shardformer.data import SpecialTokens
from shardformer.errors import UsageError

CLASS = "ForSequenceClassification"
OTHER_NAMES = {"Gemma3" + CLASS: "Gemma3Text" + CLASS}
OF_LOGITS = ("tied", "logits_scale", "logits_cap")  # keys of the vocabulary's head
# The families for which transformers 5.24 has such a class.
FAMILIES = frozenset((
    "arcee", "biogpt", "bloom", "deepseek_v2", "deepseek_v3", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "helium", "hunyuan_v1_dense",
    "llama", "ministral", "ministral3", "mistral", "mistral4", "mixtral", "mpt", "nemotron", "olmo", "olmo2",
    "olmo3", "openai-gpt", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2",
))  # fmt: skip
LABELS: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def name_class(family: Family) -> str:
    """Returns the name of transformers' class of a family with this head."""
    name = re.sub("(ForCausalLM|LMHeadModel)$", CLASS, family.architecture)
    return OTHER_NAMES.get(name, name)


def choose_head(family: Family, theirs: dict, config: Config) -> Config:
    """Returns the configuration of a language model, or of a model of rewards if config.json names that class.

    Raises UsageError for another class of labels, or for more labels than one.
    """
    given = theirs.get("architectures") or ()
    named = [name for name in ([given] if isinstance(given, str) else given) if str(name).endswith(CLASS)]
    if not named:
        return config
    if theirs["model_type"] not in FAMILIES:
        raise UsageError(
            f"architectures={named!r:.80} is no class of transformers for model_type={theirs['model_type']}"
        )
    if named != [name_class(family)]:
        raise UsageError(f"architectures={named!r:.80} is not known here; expected {name_class(family)}")
    if config.model.table_size != config.model.d_model:
        raise UsageError(
            f"{named[0]} reads its score behind the matrix of word_embed_proj_dim, which is not computed here"
        )
    labels = theirs.get("id2label")
    count = theirs.get("num_labels", 2) if labels is None else len(labels)  # transformers' default
    if count != 1:
        raise UsageError(f"{named[0]} has {count} labels, and a reward is one number; expected 1 label")
    return config.replace(objective="reward", **{name: FIELDS[name].default for name in OF_LOGITS})


def list_differences(family: str, config: Config) -> list[str]:
    """Lists the objective of a model of rewards if transformers has no class of this family for it."""
    return [] if config.objective.has_vocabulary or family in FAMILIES else [f"objective={config.objective.name}"]


def describe_written_padding(config: Config, special: SpecialTokens) -> str:
    """Returns a line that warns of the padding of a written folder, which its config.json may leave out."""
    if not config.objective.has_vocabulary and special.config.get("pad_token_id", special.padding) is None:
        return (
            "\nwarning: it has no padding, so transformers rejects batches of two or more rows; set pad_token_id in "
            "its config.json"
        )
    return describe_padding(config, special)


def describe_padding(config: Config, special: SpecialTokens) -> str:
    """Returns a line that warns of padding which ends an answer, as transformers reads no score there."""
    if config.objective.has_vocabulary or special.padding not in special.ends:
        return ""
    return (
        f"\nwarning: its padding, id {special.padding}, is an end of text: transformers reads a score before that "
        "token, and this run at it"
    )


def describe_class(family: Family, config: Config) -> dict[str, Any]:
    """Returns the keys of config.json that name the class of a model."""
    if config.objective.has_vocabulary:
        return {"architectures": [family.architecture]}
    return {"architectures": [name_class(family)]} | LABELS
