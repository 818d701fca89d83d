"""The special token ids of a model that came from elsewhere: its beginning, its ends of text, its padding.

A run saves them as `special_tokens.json`, next to `vocabulary.json` and in every checkpoint.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardformer.errors import RunError
from shardformer.files import read_text

FILE = "special_tokens.json"


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Special token ids that a published model names; all are empty for a model that was trained here from its seed."""

    beginning: int | None = None  # bos_token_id
    ends: tuple[int, ...] = ()  # eos_token_id: generation stops at any of them
    padding: int | None = None  # pad_token_id
    # Keys of the model's config.json that do not change its results (ids as published, dropouts), for the export.
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    # The ids of the tokens that tokenizer_config.json names, which may differ from those of the model.
    tokenizer_beginning: int | None = None
    tokenizer_end: int | None = None

    @property
    def first(self) -> int | None:
        """The id that starts a text if one is asked for: the tokenizer's bos, else the model's."""
        return self.beginning if self.tokenizer_beginning is None else self.tokenizer_beginning

    def documents(self) -> dict[str, str]:
        """Returns the files that keep the ids: name to text. There is none without ids and keys."""
        if self == SpecialTokens():
            return {}
        content = {
            "bos_token_id": self.beginning,
            "eos_token_id": list(self.ends),
            "pad_token_id": self.padding,
            "tokenizer_bos_token_id": self.tokenizer_beginning,
            "tokenizer_eos_token_id": self.tokenizer_end,
            "config": dict(self.config),
        }
        return {FILE: json.dumps(content, indent=2) + "\n"}


def load_special_tokens(folder: Path) -> SpecialTokens:
    """Reads the ids of a run or a checkpoint; returns an empty object where the folder has no such file."""
    path = Path(folder) / FILE
    try:
        content = json.loads(read_text(path))
        ends, config = content["eos_token_id"], content["config"]
        of_tokenizer = [content.get(f"tokenizer_{name}_token_id") for name in ("bos", "eos")]
        result = SpecialTokens(content["bos_token_id"], tuple(ends), content["pad_token_id"], config, *of_tokenizer)
        ids = [result.beginning, result.padding, *ends, *of_tokenizer]
        if not isinstance(config, dict) or not all(map(_is_id_or_none, ids)):
            raise ValueError("token ids are whole numbers, at least 0, and config is an object")
    except FileNotFoundError:
        return SpecialTokens()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged ({type(error).__name__}: {error!s:.100}); every step_ folder of a run holds a copy"
        ) from None
    return result


def _is_id_or_none(value) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**31)
