"""Text to token ids and back: by characters, by bytes, or as ids; `hf_tokenizer` adds Hugging Face's tokenizers."""

import abc
import codecs
import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from shardformer.config.parsing import shorten
from shardformer.data.text_cuts import LINE_BREAKS, Breaks
from shardformer.errors import UsageError

if TYPE_CHECKING:
    from shardformer.data.chat.chat_format import ChatFormat

FILE = "vocabulary.json"
MAX_IDS = 2**31 - 1
MAX_NAMED = 12  # unknown characters in one message


class Vocabulary(abc.ABC):
    """The interface of all tokenizers. Two are equal if their documents are equal."""

    name: str  # as in `tokenizer=`
    end_of_text: int | None = None  # the id that separates documents, where there is one
    units = "tokens"  # what messages call its entries
    breaks: Breaks = LINE_BREAKS  # the positions where a text may be cut without changing an id; none: nowhere
    notice = ""  # a line for the user about what was changed in the tokenizer's file
    template: tuple[int, ...] = ()  # ids that the tokenizer itself puts before a text, such as Llama's <s>
    beginning: tuple[int, ...] = ()  # ids that begin every document in training, and every prompt
    chat: "ChatFormat | None" = None  # how conversations become text; vocabularies with different ones are still equal

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def encode(self, text: str, source: str = "text") -> np.ndarray:
        """Returns int32 token ids of a text; `source` names the text in errors."""

    @abc.abstractmethod
    def decode(self, ids) -> str: ...

    @property
    @abc.abstractmethod
    def record(self) -> dict:
        """Returns the JSON object that identifies the vocabulary."""

    def byte_lengths(self) -> np.ndarray | None:
        """Returns the number of UTF-8 bytes of each id; None if it is unknown."""
        return None

    def token_bytes(self) -> list[bytes] | None:
        """Returns the bytes of each id inside a text, none for special tokens; None if they depend on other ids."""
        return None

    @property
    def first_id(self) -> int | None:
        """The only id of the tokenizer's template; None if it has none or more than one."""
        return self.template[0] if len(self.template) == 1 else None

    def encode_with_offsets(self, text: str, source: str = "text") -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a conversation's text, special tokens among them, and [ids, 2] positions in characters.

        The text may have the guards of `chat/letters.py`, if `letters` has tokens.
        """
        ids = self.encode(text, source)
        return ids, np.stack([np.arange(len(ids)), np.arange(1, len(ids) + 1)], axis=1)

    @property
    def letters(self) -> tuple[str, ...]:
        """The special tokens that a text has only as letters."""
        return ()

    def with_chat(self, format: "ChatFormat | None") -> "Vocabulary":
        """Returns the vocabulary with a chat template."""
        result = copy.copy(self)
        object.__setattr__(result, "chat", format)  # some vocabularies are frozen
        return result

    def encode_all(self, strings: list[str], source: str = "text") -> list[np.ndarray]:
        return [self.encode(text, source) for text in strings]

    def encode_pieces(self, strings: list[str], firsts: list[bool], source: str = "text") -> list[np.ndarray]:
        """Encodes pieces of documents; `firsts` marks the pieces that begin a document."""
        return self.encode_all(strings, source)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text in pieces of complete characters."""
        return (self.decode([token]) for token in ids)

    def first_ids(self) -> np.ndarray:
        """Returns the prompt of a text without one: the beginning, else a line feed, else token 0."""
        if self.beginning:
            return np.array(self.beginning, np.int32)
        with contextlib.suppress(UsageError):
            if (ids := self.encode("\n")).size:
                return ids
        return np.zeros(1, np.int32)

    def with_special_tokens(self, recognised: bool = True) -> "Vocabulary":
        """Returns the vocabulary that reads '<|endoftext|>' in a text as its id, or as plain text."""
        return self

    def with_beginning(self, bos: str, first: int | None = None) -> "Vocabulary":
        """Returns the vocabulary with the beginning that `bos` names; auto is the tokenizer's template.

        first: the beginning of text that a published model names, for bos=true without a template.
        """
        if bos == "true":
            raise UsageError(f"bos=true: tokenizer={self.name} puts no token before a text; leave bos out")
        return self

    def without_options(self) -> "Vocabulary":
        """Returns the vocabulary that special_tokens=true bos=false gives, to compare tokenizers only."""
        return self.with_special_tokens().with_beginning("false")

    def decode_without_special_tokens(self, ids) -> str:
        return self.decode(ids)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()

    def documents(self, *, source: str, fingerprint: str) -> dict[str, str]:
        """Returns the files that keep the vocabulary: name to text."""
        record = self.record | {"source": source, "fingerprint": fingerprint}
        return {FILE: json.dumps(record, indent=2) + "\n"} | (self.chat.documents() if self.chat else {})

    def _check_ids(self, ids) -> np.ndarray:
        ids = np.asarray(ids, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self):
            raise ValueError(f"token ids lie in 0..{len(self) - 1}, got {ids.min()}..{ids.max()}")
        return ids


@dataclasses.dataclass(frozen=True)
class Characters(Vocabulary):
    """The distinct characters of a text, sorted; a character's token id is its index."""

    characters: str
    owner: str = dataclasses.field(default="the corpus", compare=False)  # named in errors
    name = "chars"
    units = "characters"

    def __post_init__(self):
        text = isinstance(self.characters, str) and self.characters
        if not text or list(text) != sorted(set(text)):
            raise ValueError(
                f"a vocabulary is sorted, distinct characters, at least one; got {shorten(self.characters)}"
            )

    @classmethod
    def from_text(cls, text: Iterable[str]) -> "Characters":
        if not text:
            raise UsageError("the text is empty; give at least one character")
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    @property
    def record(self) -> dict:
        return {"characters": self.characters}

    def encode(self, text: str, source: str = "text") -> np.ndarray:
        ids = self._ids_by_code_point[np.minimum(_code_points(text), len(self._ids_by_code_point) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            raise UsageError(self._describe_unknown(text, unknown, source))
        return ids

    @functools.cached_property
    def _ids_by_code_point(self) -> np.ndarray:
        """Ids by code point, -1 for unknown ones; the last entry is for all larger code points."""
        known = _code_points(self.characters)
        ids = np.full(int(known[-1]) + 2, -1, np.int32)
        ids[known] = np.arange(len(known))
        return ids

    def decode(self, ids) -> str:
        return _code_points(self.characters)[self._check_ids(ids)].tobytes().decode("utf-32-le", "surrogatepass")

    def byte_lengths(self) -> np.ndarray:
        return np.array([len(c.encode("utf-8", "surrogatepass")) for c in self.characters], np.int32)

    def token_bytes(self) -> list[bytes]:
        return [character.encode("utf-8", "replace") for character in self.characters]

    def _describe_unknown(self, text: str, unknown: np.ndarray, source: str) -> str:
        """Describes the first unknown character and lists all; `unknown` has indices of the text."""
        index = int(unknown[0])
        line_start = text.rfind("\n", 0, index) + 1
        line = text.count("\n", 0, index) + 1
        first = text[index]
        missing = sorted({text[at] for at in unknown})
        named = " ".join(map(repr, missing[:MAX_NAMED])) + (" ..." if len(missing) > MAX_NAMED else "")
        it, all_of_them = ("them", f" ({len(missing)} are not: {named})") if len(missing) > 1 else ("it", "")
        return (
            f"{source}: character {first!r} (U+{ord(first):04X}) at index {index} (line {line}, column "
            f"{index - line_start + 1}) is not among the {len(self)} characters of {self.owner}{all_of_them}; "
            f"replace {it}, choose another text, or train with tokenizer=bytes, which knows every character"
        )


@dataclasses.dataclass(frozen=True)
class Bytes(Vocabulary):
    """The bytes of UTF-8, and one id that separates documents."""

    name = "bytes"
    units = "bytes"
    end_of_text = 256

    def __len__(self) -> int:
        return 257

    @property
    def record(self) -> dict:
        return {"tokenizer": self.name}

    def encode(self, text: str, source: str = "text") -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def encode_with_offsets(self, text: str, source: str = "text") -> tuple[np.ndarray, np.ndarray]:
        lengths = [len(character.encode("utf-8", "surrogatepass")) for character in text]
        places = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text, source), np.stack([places, places + 1], axis=1)

    def decode(self, ids) -> str:
        return "".join(self.decode_stream(self._check_ids(ids).tolist()))

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            yield decoder.decode(b"", final=True) if token == self.end_of_text else decoder.decode(bytes([token]))
        yield decoder.decode(b"", final=True)

    def byte_lengths(self) -> np.ndarray:
        return np.array([1] * 256 + [0], np.int32)

    def token_bytes(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)] + [b""]


@dataclasses.dataclass(frozen=True)
class TokenIds(Vocabulary):
    """Token ids without a tokenizer: their text is decimal ids, separated by spaces."""

    size: int
    name = "ids"

    def __post_init__(self):
        if type(self.size) is not int or not 0 < self.size <= MAX_IDS:
            raise ValueError(f"a vocabulary has 1 to {MAX_IDS} token ids; got {shorten(self.size)}")

    def __len__(self) -> int:
        return self.size

    @property
    def record(self) -> dict:
        return {"tokenizer": self.name, "size": self.size}

    def encode(self, text: str, source: str = "text") -> np.ndarray:
        try:
            return self._check_ids([int(word) for word in text.split()]).astype(np.int32)
        except (ValueError, OverflowError):
            raise UsageError(
                f"{source}: this model has token ids without a tokenizer: give numbers in 0..{self.size - 1}, such as "
                f"'464 2068', or convert or train it with tokenizer=PATH of its tokenizer.json; got {shorten(text)}"
            ) from None

    def encode_with_offsets(self, text: str, source: str = "text") -> tuple[np.ndarray, np.ndarray]:
        raise UsageError(
            f"{source}: conversations need a tokenizer, and this model has token ids only; give tokenizer=PATH"
        )

    def decode(self, ids) -> str:
        return " ".join(map(str, self._check_ids(ids).tolist()))

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        return (f"{' ' if number else ''}{token}" for number, token in enumerate(ids))


def _code_points(text: str) -> np.ndarray:
    # A prompt from the command line can hold lone surrogates, which are then reported as unknown characters.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
