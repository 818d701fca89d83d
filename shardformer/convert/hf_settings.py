"""Hugging Face's config.json and ours. A value that our model cannot express is rejected with its name."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from shardformer.config import ARCHITECTURE, FIELDS, Config, is_hugging_face
from shardformer.config.parsing import shorten
from shardformer.convert import baichuan, hf_special_tokens, reward_heads
from shardformer.convert.families import FAMILIES, REJECTED
from shardformer.convert.families.family import TO_ACTIVATIONS, Family, resolve_aliases
from shardformer.convert.families.hf_gptj import rename_fork_keys
from shardformer.convert.text_models import find_text_config
from shardformer.data import SpecialTokens, Vocabulary
from shardformer.errors import UsageError
from shardformer.storage import BucketPath, read_small

NAME = "config.json"
# Keys of every family that transformers writes by itself and that do not change the logits.
SILENT = {
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "task_specific_params", "tokenizer_class", "gradient_checkpointing", "return_dict",
    "output_attentions", "output_hidden_states", "is_decoder", "id2label", "label2id", "problem_type",
    "classifier_dropout", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "_commit_hash", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
# Keys that others added and that do not change the logits: each is reported in one line.
HARMLESS = {
    "_num_labels", "num_labels", "finetuning_task", "torchscript", "use_bfloat16", "auto_map", "custom_pipeline",
    "custom_pipelines", "unsloth_version", "unsloth_fixed", "neftune_noise_alpha", "_flash_attn_2_enabled",
    "predict_special_tokens", "output_past", "intermediate_dropout", "gradient_checkpointing_",
    "jax", "full_bf16", "transformers.js_config", "model_device", "model_dtype",
    # How transformers samples, in the years before generation_config.json.
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "prefix",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sep_token_id",
    "decoder_start_token_id",
}  # fmt: skip

# Keys of the model that change neither its results nor the arrays of a folder.
NOT_COMPARED = {"vocab_multiple", "init_std"}

# Other names of families, of files from before transformers had their classes, with the keys that such files leave out.
OLDER_TYPES: dict[str, dict[str, Any]] = {
    "RefinedWeb": {"model_type": "falcon", "new_decoder_architecture": True},
    "RefinedWebModel": {"model_type": "falcon"},
    "youtu_llm": {"model_type": "youtu"},
    "gpt-sw3": {"model_type": "gpt2"},  # a second name of transformers' own for this class
}

EMPTY: tuple[Any, ...] = (None, False, "", [], {})


class PublishedModel(NamedTuple):
    """The model that a Hugging Face folder describes."""

    family: str
    config: Config
    positions: int  # rows of its table of learned positions, of which config.seq are read
    special_tokens: SpecialTokens
    ignored: dict[str, Any]  # the keys that are reported as without effect


def is_hf_folder(folder: Path | BucketPath) -> bool:
    try:
        return is_hugging_face(read_small(folder / NAME))
    except OSError:
        return False


def read_config(folder: Path | BucketPath) -> tuple[str, Config]:
    """Returns the family of a folder's model, and the model as a Config."""
    return read_model(folder)[:2]


def read_model(folder: Path | BucketPath, ignored: Collection[str] = (), seq: int = 0) -> PublishedModel:
    """Reads config.json without the keys `ignored`. seq: a shorter context, for which fewer positions are read."""
    path = folder / NAME
    theirs = _read_text_config(path)
    name = theirs["model_type"]
    if isinstance(name, str) and name in REJECTED:
        raise UsageError(f"{path}: model_type={name!r} is not computed here; missing: {REJECTED[name]}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UsageError(
            f"{path}: model_type={name!r:.80} is not known; there are {', '.join(FAMILIES)}; "
            ".github/CONTRIBUTING.md shows how to add a family"
        )
    try:
        theirs = rename_fork_keys(_drop_ignored(FAMILIES[name], theirs, ignored))
        name = theirs["model_type"]
        config = reward_heads.choose_head(FAMILIES[name], theirs, _to_config(FAMILIES[name], theirs))
        special = hf_special_tokens.read_special_tokens(folder, FAMILIES[name], theirs, config.model.vocab)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error!s:.100}") from None
    positions = config.model.seq
    if 0 < seq <= config.model.seq:
        config = config.replace(seq=seq)
    harmless = {*HARMLESS, *FAMILIES[name].harmless}
    without_effect = {key: value for key, value in theirs.items() if key in harmless and value not in EMPTY}
    return PublishedModel(name, config, positions, special, without_effect)


def _read_text_config(path: Path | BucketPath) -> dict:
    try:
        theirs = json.loads(read_small(path))
        if not isinstance(theirs, dict):
            raise UsageError(f"it is a JSON {type(theirs).__name__}, expected an object; copy it again")
        return find_text_config(_rename_older_config(baichuan.rename_config(theirs)))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _rename_older_config(theirs: dict[str, Any]) -> dict[str, Any]:
    older = OLDER_TYPES.get(str(theirs["model_type"]))
    return older | theirs | {"model_type": older["model_type"]} if older else theirs


def describe_ignored(folder: Path | BucketPath, keys: dict[str, Any]) -> str:
    """Names the keys of config.json that have no effect on the model, in one line."""
    named = ", ".join(f"{key}={shorten(value, 40)}" for key, value in keys.items())
    return f"{folder / NAME}: ignored, without effect on the model: {named}"


def _drop_ignored(family: Family, theirs: dict, ignored: Collection[str]) -> dict:
    for key in ignored:
        if key not in theirs:
            raise UsageError(f"ignore_config={key}: config.json has no such key")
        if key in {"model_type", *family.names.values()}:
            raise UsageError(f"ignore_config={key}: the model cannot be built without it")
    return {key: value for key, value in theirs.items() if key not in ignored}


def _to_config(family: Family, theirs: dict) -> Config:
    theirs = family.defaults | resolve_aliases(theirs, family.aliases)
    _check_keys(family, theirs)
    values = {ours: theirs[key] for ours, key in family.names.items()}
    if not values["vocab"]:
        raise UsageError(f"{family.names['vocab']}={values['vocab']!r}: the number of tokens is missing")
    values["d_ff"] = values.get("d_ff") or None
    return Config.of(**family.ours | values | family.read(theirs) | {"vocab_multiple": 8})


def _check_keys(family: Family, theirs: dict) -> None:
    """Rejects a key that may change the model in a way that is not computed here."""
    known = {*family.names.values(), *family.defaults, *family.fixed, *family.also, *family.dropouts}
    known |= {*family.silent, *family.harmless, *SILENT, *HARMLESS}
    for key, value in theirs.items():
        if key not in known and value not in EMPTY:
            raise UsageError(
                f"{key}={value!r:.80} is not known here, and may change what the model computes; "
                f"if it does not, give ignore_config={key}"
            )
    for key, values in family.fixed.items():
        if theirs.get(key, values[0]) not in values:
            raise UsageError(f"{key}={theirs[key]!r:.80} is not computed here; expected {values[0]!r}")


def write_config(
    folder: Path, name: str, config: Config, dtype: str, special: SpecialTokens, vocabulary: Vocabulary
) -> None:
    """Writes config.json: the model, and the keys that its run has kept from the config.json that it came from."""
    family = FAMILIES[name]
    theirs: dict[str, Any] = {"model_type": name, "dtype": dtype, "torch_dtype": dtype}
    theirs |= reward_heads.describe_class(family, config)
    theirs |= {key: values[0] for key, values in family.fixed.items() if values[0] is not None}
    theirs |= {key: config.get(ours) for ours, key in family.names.items()} | family.write(config)
    if "d_ff" in family.names:
        theirs[family.names["d_ff"]] = config.model.ff_size
    if "expert_width" in family.names:
        theirs[family.names["expert_width"]] = config.mixture.expert_size
    theirs |= dict.fromkeys(family.dropouts, config.training.dropout)
    stored = hf_special_tokens.find_stored(special, name, theirs)
    theirs |= hf_special_tokens.name_ids(special, vocabulary) | stored | {"model_type": name}
    (folder / NAME).write_text(json.dumps(theirs, indent=2) + "\n")


def choose_family(config: Config, published: str | None = None) -> str:
    """Returns a family that computes what this model computes; the error names the differences from the closest.

    published: the family that the model came from, which is chosen before others, as a Mistral without windows is also
    a Llama.
    """
    problems = {
        name: list_differences(family, config) + reward_heads.list_differences(name, config)
        for name, family in FAMILIES.items()
    }
    closest = min(problems, key=lambda name: (len(problems[name]), name != published))
    if problems[closest]:
        raise UsageError(
            f"no Hugging Face family has {' '.join(problems[closest])}; the closest, {closest}, differs there"
        )
    return closest


def list_differences(family: Family, c: Config) -> list[str]:
    """Lists those of our keys that have values which a family does not compute.

    A key that the family does not mention must have its default.
    """
    defaults = {key: (FIELDS[key].default,) for key in ARCHITECTURE if key not in {*family.names, *NOT_COMPARED}}
    wanted: dict[str, tuple | None] = {**defaults, "lora_rank": (0,), "kv_heads": (None, c.model.heads)}
    wanted |= {"head_dim": (None, c.model.d_model // c.model.heads)}
    wanted |= {"activation": tuple(TO_ACTIVATIONS)} | {key: (value,) for key, value in family.ours.items()}
    wanted |= family.variants(c)
    # The table takes up a bias that no other reads.
    takes_bias = not c.model.tied and c.model.positions != "learned" and c.model.embed_scale == 1
    if wanted["embed"] == ("plain",) and takes_bias:
        wanted["embed"] = ("plain", "bias")
    no_effect = ["head_bias"] if c.model.tied or "head" not in c.model.biased else []
    if not c.objective.has_vocabulary:
        no_effect += ["head_bias", *reward_heads.OF_LOGITS]
    if c.model.positions != "rotary":
        no_effect += ["rotary_dims", "rotary_scaling", "rotary_theta"]
    return [
        f"{key}={c.shown(key)}"
        for key, values in wanted.items()
        if values is not None and key not in no_effect and c.get(key) not in values
    ]
