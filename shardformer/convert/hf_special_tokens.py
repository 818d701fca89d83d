"""The special token ids of a Hugging Face folder: read in transformers' order, and written back.

A model that was trained on conversations ends its documents at the end of an assistant's turn.
"""

import json
from pathlib import Path
from typing import Any

from shardformer.convert.families.family import Family
from shardformer.data import SpecialTokens, Vocabulary
from shardformer.errors import UsageError
from shardformer.inference.chat_codec import ChatCodec
from shardformer.messages import log
from shardformer.storage import BucketPath, read_small
from shardformer.training.run_folder import Run

GENERATION, TOKENIZER, TOKENS = "generation_config.json", "tokenizer_config.json", "tokenizer.json"
IDS = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}
# Keys of config.json that neither change the logits nor follow from the model: kept for the conversion back.
PUBLISHED_KEYS = ("model_type", "initializer_range", "tokenizer_class", "task_specific_params")
# Keys of activations: two or more names of transformers mean one activation of ours, with logits up to 1.2e-6 apart.
ACTIVATION_KEYS = ("hidden_act", "activation_function", "hidden_activation")


def read_special_tokens(folder: Path | BucketPath, family: Family, config: dict, vocab: int) -> SpecialTokens:
    """Returns the ids of generation_config.json, else of `config` with its class's defaults, else of the tokenizer."""
    from_config = {key: config.get(key, family.defaults[key]) for key in IDS}
    ids = _as_ids(_read_json(folder, GENERATION), vocab, GENERATION)
    for key, values in _as_ids(from_config, vocab, "config.json").items():
        ids[key] = ids[key] or values
    of_tokenizer = _as_ids(_read_tokenizer_ids(folder), vocab, TOKENIZER)
    for key, values in of_tokenizer.items():
        ids[key] = ids[key] or values
    published = {
        key: config[key] for key in (*family.dropouts, *PUBLISHED_KEYS, *ACTIVATION_KEYS) if config.get(key) is not None
    }
    first, tokenizer = (
        {key: values[0] if values else None for key, values in some.items()} for some in (ids, of_tokenizer)
    )
    return SpecialTokens(
        first["bos_token_id"], ids["eos_token_id"], first["pad_token_id"], from_config | published,
        tokenizer["bos_token_id"], tokenizer["eos_token_id"],
    )  # fmt: skip


def _as_ids(settings: dict, vocab: int, name: str) -> dict[str, tuple[int, ...]]:
    """Returns each key's ids that the model has; a folder may name -1, or an id that was never added."""
    result = {}
    for key in IDS:
        value = settings.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int for one in values):
            raise UsageError(
                f"{name}: {key}={value!r:.80} is not a token id; expected a whole number or a list of them"
            )
        result[key] = tuple(one for one in values if 0 <= one < vocab)
    return result


def _read_json(folder: Path | BucketPath, name: str) -> dict:
    try:
        content = json.loads(read_small(folder / name))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{folder / name} is damaged: {error!s:.100}; copy it again") from None
    return content if isinstance(content, dict) else {}


def _read_tokenizer_ids(folder: Path | BucketPath) -> dict[str, int]:
    """Returns the ids of the tokens that tokenizer_config.json names, by its list or by tokenizer.json's."""
    settings, ids = _read_json(folder, TOKENIZER), {}
    named = {key: settings.get(token) for key, token in IDS.items()}
    contents = {key: token.get("content") if isinstance(token, dict) else token for key, token in named.items()}
    if not any(contents.values()):
        return {}
    added = settings.get("added_tokens_decoder")
    for number, token in (added if isinstance(added, dict) else {}).items():
        if isinstance(token, dict) and number.isascii() and number.isdecimal():
            ids[token.get("content")] = int(number)
    if not ids:
        for entry in _read_json(folder, TOKENS).get("added_tokens") or []:
            ids[entry["content"]] = entry["id"]
    return {key: ids[content] for key, content in contents.items() if content in ids}


def name_ids(special: SpecialTokens, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the ids of a run for config.json: null where there is none, as the class's default would be wrong."""
    ends = list(special.ends)
    if not ends and vocabulary.end_of_text is not None:
        ends = [vocabulary.end_of_text]
    beginning = vocabulary.first_id if special.beginning is None else special.beginning
    end = ends[0] if len(ends) == 1 else ends or None
    return {"bos_token_id": beginning, "eos_token_id": end, "pad_token_id": special.padding}


def find_stored(special: SpecialTokens, name: str, theirs: dict) -> dict[str, Any]:
    """Returns the kept keys of config.json for a model of family `name`, whose own keys are `theirs`.

    The name of an activation is kept only for the family that it came from, under the key that this family reads.
    """
    stored = dict(special.config)
    same_family = stored.get("model_type") == name
    return {
        key: value for key, value in stored.items() if key not in ACTIVATION_KEYS or (same_family and key in theirs)
    }


def write_generation_config(
    folder: Path, special: SpecialTokens, vocabulary: Vocabulary, end_of_turn: int | None = None
) -> None:
    """Writes generation_config.json, or keeps the one that the model came with; `end_of_turn` joins its ends."""
    path = folder / GENERATION
    ids = {key: value for key, value in name_ids(special, vocabulary).items() if value is not None}
    settings = _read_json(folder, GENERATION) if path.exists() else ids
    ends = settings.get("eos_token_id", ids.get("eos_token_id"))
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end_of_turn is not None and end_of_turn not in known:
        settings = settings | {"eos_token_id": [*known, end_of_turn]}
    elif path.exists():
        return
    if settings:
        path.write_text(json.dumps(settings, indent=2) + "\n")


UNKNOWN = "generation_config.json names no end of an assistant's turn:"


def find_end_of_turn(run: Run) -> int | None:
    """Returns the id that ends a turn; None without training here, without a template, and where a text ends it."""
    format = run.vocabulary.chat
    if format is None or not run.fingerprint:  # a converted model keeps what was published
        return None
    try:
        codec = ChatCodec(run.vocabulary, format)
    except UsageError as error:
        log.info(f"{UNKNOWN} {error}")
        return None
    if codec.ends:
        return min(codec.ends)
    log.info(f"{UNKNOWN} text ends it; give it to transformers: generate(..., stop_strings={codec.strings!r})")
    return None
