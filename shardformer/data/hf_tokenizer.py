"""Hugging Face's tokenizers: any `tokenizer.json`, and byte-level BPE trained on the corpus, offline.

The package `tokenizers` does the work, because a tokenizer.json has any of a dozen pre-tokenizers, models
and normalizers, and only the code that wrote it gives the same ids for all of them. It encodes in parallel, in Rust.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardformer.data import text_cuts
from shardformer.data.chat.letters import remove_guards
from shardformer.data.text_cuts import Breaks, cut_text
from shardformer.data.token_bytes import list_token_bytes
from shardformer.data.tokenizer_growth import MAX_GROWTH, bound_growth
from shardformer.data.tokenizer_pieces import find_breaks, list_unknown, remove_prefix
from shardformer.data.vocabulary import FILE, Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.files import read_text

if TYPE_CHECKING:
    import tokenizers

COPY = "tokenizer.json"
GPT2_FILES = ("vocab.json", "merges.txt")
SENTENCEPIECE = "tokenizer.model"
MAX_FILE = 256 << 20  # bytes; the largest public ones have 35 MB
END_OF_TEXT = "<|endoftext|>"
OTHER_ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
NEEDS = "needs the package tokenizers; install it: pip install tokenizers"


class HfTokenizer(Vocabulary):
    def __init__(self, name: str, text: str, special_tokens: bool = False, beginning: tuple[int, ...] = ()):
        """Parses the text of a tokenizer.json. special_tokens: '<|endoftext|>' in a text is its id, not its letters."""
        self.name, self.text, self.special_tokens, self.beginning = name, text, special_tokens, beginning
        self._document = json.loads(text)
        if chance := _remove_dropout(self._document):
            self.notice = (
                f"tokenizer={name} has dropout={chance}, which would give other ids at every start: it is off here"
            )
        if (growth := bound_growth(self._document)) > MAX_GROWTH:
            raise UsageError(
                f"tokenizer={name} makes a text up to {growth:,.3g} times as long, more than the {MAX_GROWTH} of any "
                "tokenizer; leave out some of its replacements"
            )
        self._tokenizer = self._make_tokenizer(self._document)
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(self._ids.values(), default=-1) + 1
        if not self._size:
            raise ValueError("its vocabulary is empty")
        if unknown := list_unknown(self._document.get("post_processor"), self._size):
            raise UsageError(
                f"tokenizer={name}: its post_processor puts {unknown[0]!r:.80} around a text, a token that its "
                "vocabulary lacks; add the token, or remove it from the post_processor"
            )
        self.end_of_text = next((self._ids[end] for end in (END_OF_TEXT, *OTHER_ENDS) if end in self._ids), None)
        self.template = self._find_template()

    def _find_template(self) -> tuple[int, ...]:
        """Returns the ids that the post-processor puts before a text."""
        for probe in ("a", " a", ""):
            try:
                encoding = self._tokenizer.encode(probe, add_special_tokens=True)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a WordLevel model without unk; a panic of Rust is no Exception
                continue
            added = encoding.special_tokens_mask
            if 0 in added:
                return tuple(encoding.ids[: added.index(0)])
            if len(added) == 1 and encoding.ids[0] != self.end_of_text:  # no probe has tokens
                return tuple(encoding.ids)
        return ()

    def _make_tokenizer(self, document: dict) -> "tokenizers.Tokenizer":
        text = self.text if document is self._document and not self.notice else json.dumps(document)
        tokenizer = _import_package(self.name).Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not self.special_tokens
        return tokenizer

    @functools.cached_property
    def _continuation(self) -> "tokenizers.Tokenizer":
        """The tokenizer of every piece of a document but the first: it adds no prefix."""
        document = remove_prefix(self._document)
        return self._tokenizer if document == self._document else self._make_tokenizer(document)

    @functools.cached_property
    def breaks(self) -> Breaks:  # type: ignore[override]  # computed at its first use: this costs 50 ms
        return find_breaks(self._tokenizer, self._continuation)

    @functools.cached_property
    def _chat_tokenizer(self) -> "tokenizers.Tokenizer":
        """The tokenizer of conversations: special tokens are recognised, and offsets keep the spaces of tokens."""
        tokenizer = self._make_tokenizer(self._document | {"post_processor": None})
        tokenizer.encode_special_tokens = False
        return tokenizer

    def encode_with_offsets(self, text: str, source: str = "text") -> tuple[np.ndarray, np.ndarray]:
        plain, guards = remove_guards(text) if self.letters else (text, [])
        try:
            result = self._chat_tokenizer.encode(plain, add_special_tokens=False)
            ids, offsets = np.array(result.ids, np.int32), np.array(result.offsets, np.int64).reshape(-1, 2)
            return (ids, offsets) if not guards else self._spell(plain, guards, ids, offsets)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            if _find_half_character(text):
                raise UsageError(_describe_half_character([text], source)) from None
            raise UsageError(f"{source}: tokenizer={self.name} fails to encode it ({error!s:.200})") from None

    def _spell(
        self, text: str, guards: list[int], ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids with the letters of guarded special tokens, and offsets in the text with its guards."""
        special = [self._ids[token] for token in self._special_tokens]
        before, until = (np.searchsorted(guards, borders, side="right") for borders in offsets.T)
        new_ids, new_offsets, border = [], [], 0
        for n in np.flatnonzero(np.isin(ids, special) & (before < until)):
            start, end = offsets[n]
            letters = self._continuation.encode(text[start:end], add_special_tokens=False)
            new_ids += [ids[border:n], np.array(letters.ids, np.int32)]
            new_offsets += [offsets[border:n], start + np.array(letters.offsets, np.int64).reshape(-1, 2)]
            border = int(n) + 1
        ids, offsets = np.concatenate([*new_ids, ids[border:]]), np.concatenate([*new_offsets, offsets[border:]])
        return ids, offsets + np.searchsorted(guards, offsets, side="right")

    @functools.cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        return tuple(token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special)

    @property
    def letters(self) -> tuple[str, ...]:
        return () if self.special_tokens else self._special_tokens

    def __len__(self) -> int:
        return self._size

    def with_special_tokens(self, recognised: bool = True) -> "HfTokenizer":
        if recognised == self.special_tokens:
            return self
        return HfTokenizer(self.name, self.text, recognised, self.beginning).with_chat(self.chat)  # type: ignore[return-value]

    def with_beginning(self, bos: str, first: int | None = None) -> "HfTokenizer":
        beginning = () if bos == "false" else self.template
        if bos == "true" and not beginning:
            if first is None:
                return super().with_beginning(bos)  # type: ignore[return-value]  # raises
            beginning = (first,)
        if beginning == self.beginning:
            return self
        result = HfTokenizer(self.name, self.text, self.special_tokens, beginning)
        return result.with_chat(self.chat)  # type: ignore[return-value]  # a copy of itself

    def __eq__(self, other) -> bool:
        return isinstance(other, HfTokenizer) and self.record == other.record

    def __hash__(self) -> int:
        return hash(self.sha256)

    @functools.cached_property
    def record(self) -> dict:
        """Identifies the file by its content, as a copy may have another path."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        record = {"tokenizer": "tokenizer.json", "sha256": digest, "special_tokens": self.special_tokens}
        return record | ({"beginning": list(self.beginning)} if self.beginning else {})

    def documents(self, *, source: str, fingerprint: str) -> dict[str, str]:
        record = self.record | {"name": self.name, "source": source, "fingerprint": fingerprint}
        files = {FILE: json.dumps(record, indent=2) + "\n", COPY: self.text}
        return files | (self.chat.documents() if self.chat else {})

    def encode(self, text: str, source: str = "text") -> np.ndarray:
        """Encodes a text; a long one in pieces, by all cores."""
        pieces = cut_text(text, self.breaks) if len(text) > text_cuts.LIMITS.piece else [text]
        return np.concatenate(self.encode_pieces(pieces, [True] + [False] * (len(pieces) - 1), source))

    def encode_all(self, strings: list[str], source: str = "text") -> list[np.ndarray]:
        return self._encode_with(self._tokenizer, strings, source)

    def encode_pieces(self, strings: list[str], firsts: list[bool], source: str = "text") -> list[np.ndarray]:
        """Encodes pieces of documents; only the first piece of a document has the tokenizer's prefix."""
        if self._continuation is self._tokenizer or all(firsts):
            return self.encode_all(strings, source)
        begin = [text for text, first in zip(strings, firsts, strict=True) if first]
        go_on = [text for text, first in zip(strings, firsts, strict=True) if not first]
        begun = iter(self.encode_all(begin, source))
        continued = iter(self._encode_with(self._continuation, go_on, source))
        return [next(begun if first else continued) for first in firsts]

    def _encode_with(self, tokenizer: "tokenizers.Tokenizer", strings: list[str], source: str) -> list[np.ndarray]:
        try:
            result = tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            if any(_find_half_character(text) for text in strings):  # the only strings that the package cannot take
                raise UsageError(_describe_half_character(strings, source)) from None
            raise UsageError(
                f"{source}: tokenizer={self.name} fails to encode it ({error!s:.200}); give a tokenizer that knows "
                "every text, such as tokenizer=bytes"
            ) from None
        return [np.array(encoding.ids, np.int32) for encoding in result]

    @property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in self.text

    def decode(self, ids) -> str:
        return self._tokenizer.decode(self._check_ids(ids).tolist(), skip_special_tokens=False)

    def decode_without_special_tokens(self, ids) -> str:
        return self._tokenizer.decode(self._check_ids(ids).tolist(), skip_special_tokens=True)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields one piece for each id, empty while a character is incomplete."""
        stream = _import_package(self.name).decoders.DecodeStream(skip_special_tokens=False)
        waiting: list[int] = []
        for token in ids:
            piece = stream.step(self._tokenizer, token)
            waiting = [] if piece else [*waiting, token]
            yield piece or ""
        yield self.decode(waiting)

    def byte_lengths(self) -> np.ndarray | None:
        """Returns the bytes of each token of a byte-level tokenizer: one a letter, none of special tokens."""
        if not self._is_byte_level:
            return None
        added = self._tokenizer.get_added_tokens_decoder()
        lengths = np.zeros(len(self), np.int32)
        for token, number in self._ids.items():
            if number not in added:
                lengths[number] = len(token)
            elif not added[number].special:
                lengths[number] = len(added[number].content.encode())
        return lengths

    def token_bytes(self) -> list[bytes] | None:
        return list_token_bytes(self._document, self._ids, len(self))


def _remove_dropout(document: dict) -> float:
    """Turns a BPE's random merges off in place; returns their chance, 0 if there were none."""
    model = document["model"]
    return model.pop("dropout") if model.get("dropout") else 0.0


def _find_half_character(text: str) -> str | None:
    result = re.search("[\ud800-\udfff]", text)
    return result and result[0]


def _describe_half_character(strings: Iterable[str], source: str) -> str:
    lone = next(filter(None, map(_find_half_character, strings)))
    return f"{source}: {lone!r} is half of a character (a lone surrogate); remove it"


def open_file(path: Path, special_tokens: bool = False) -> HfTokenizer:
    """Opens a tokenizer.json, or the folder that contains it or GPT-2's vocab.json and merges.txt."""
    _import_package(str(path))
    if path.is_dir():
        return _open_folder(path, special_tokens)
    try:
        size = path.stat().st_size
        if size > MAX_FILE:
            raise UsageError(f"tokenizer={path} has {size:,} bytes, which no tokenizer.json has ({MAX_FILE:,} at most)")
        return _parse(str(path.resolve()), read_text(path, MAX_FILE), special_tokens)
    except OSError as error:
        raise UsageError(
            f"tokenizer={path} cannot be read: {error.strerror}; tokenizer takes chars, bytes, bpe:N, ids or the path "
            "of a tokenizer.json"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"tokenizer={path} is not a tokenizer.json of Hugging Face's ({str(error)[:200]}); "
            "save one with tokenizer.save('tokenizer.json')"
        ) from None


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder contains the vocabulary of a tokenizer, readable or not."""
    return any(os.path.lexists(folder / name) for name in (COPY, GPT2_FILES[0], SENTENCEPIECE))


def _open_folder(folder: Path, special_tokens: bool) -> HfTokenizer:
    if os.path.lexists(folder / COPY):  # also a link that leads nowhere, a folder or a pipe: these are rejected
        if (folder / COPY).is_dir():
            raise UsageError(f"tokenizer={folder / COPY} is a folder; expected the file of a tokenizer")
        return open_file(folder / COPY, special_tokens)
    if all(os.path.lexists(folder / name) for name in GPT2_FILES):
        return _build_gpt2_tokenizer(folder, special_tokens)
    if result := [name for name in (*GPT2_FILES, SENTENCEPIECE) if os.path.lexists(folder / name)]:
        raise UsageError(
            f"tokenizer={folder} has {result[0]} and no tokenizer.json; make one there: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers, or give tokenizer=ids"
        )
    raise UsageError(f"tokenizer={folder} is a folder without tokenizer.json; name the file of a tokenizer")


def _build_gpt2_tokenizer(folder: Path, special_tokens: bool) -> HfTokenizer:
    """Builds GPT-2's byte-level BPE from vocab.json and merges.txt, as GPT2Tokenizer reads them."""
    tokenizers = _import_package(str(folder))
    try:
        vocabulary, merges = (read_text(folder / name, MAX_FILE) for name in GPT2_FILES)
        ids = json.loads(vocabulary)
        lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
        pairs = [(first, second) for first, second in (line.split(" ") for line in lines)]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=pairs))
    except OSError as error:
        raise UsageError(f"tokenizer={folder} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # of the package: plain Exceptions
        raise UsageError(
            f"tokenizer={folder}: {GPT2_FILES[0]} and {GPT2_FILES[1]} are not those of a byte-level BPE "
            f"({error!s:.200}); bring the published files back"
        ) from None
    settings = _read_settings(folder / "tokenizer_config.json")
    added = settings.get("added_tokens_decoder")
    tokens = [token for token in added.values() if isinstance(token, dict)] if isinstance(added, dict) else []
    names = {str(token.get("content")) for token in tokens} | _read_settings(folder / "added_tokens.json").keys()
    prefix = bool(settings.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if unknown := sorted(names - ids.keys()):
        raise UsageError(
            f"tokenizer={folder} has the token {unknown[0]!r} beside {GPT2_FILES[0]}; make a tokenizer.json: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
        )
    if missing := [letter for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet() if letter not in ids]:
        raise UsageError(
            f"tokenizer={folder}: {GPT2_FILES[0]} lacks {len(missing)} of the 256 letters of a byte-level BPE; make a "
            "tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
        )
    tokenizer.add_special_tokens(sorted(names | ({END_OF_TEXT, *OTHER_ENDS} & ids.keys())))
    return HfTokenizer(str(folder.resolve()), tokenizer.to_str(), special_tokens)


def _read_settings(path: Path) -> dict:
    """Reads a JSON object of a tokenizer's folder; a missing file is empty."""
    try:
        result = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"tokenizer={path.parent}: {path.name} cannot be read ({error!s:.200})") from None
    if not isinstance(result, dict):
        raise UsageError(f"tokenizer={path.parent}: {path.name} is not a JSON object")
    return result


def load_copy(folder: Path, record: dict) -> HfTokenizer:
    """Loads the tokenizer next to a vocabulary.json; raises RunError if the record names another."""
    path = Path(folder) / COPY
    try:
        text = read_text(path, MAX_FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != record["sha256"]:
        raise RunError(
            f"{path} is not the tokenizer that {folder} was made with: its sha256 is {digest[:12]}, expected "
            f"{record['sha256'][:12]}; bring the old file back, every step_ folder of a run holds a copy"
        )
    beginning = tuple(int(token) for token in record.get("beginning", ()))  # runs of old have none
    return _parse(str(record["name"]), text, bool(record["special_tokens"]), beginning)


def _parse(name: str, text: str, special_tokens: bool, beginning: tuple[int, ...] = ()) -> HfTokenizer:
    """Parses a tokenizer; raises ValueError. The package raises plain Exceptions, and its panics are BaseExceptions."""
    try:
        return HfTokenizer(name, text, special_tokens, beginning)
    except (UsageError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{error!s:.200}") from None


def train_bpe(strings: Iterable[str], size: int, special_tokens: bool = False) -> HfTokenizer:
    """Trains a byte-level BPE with GPT-2's words, of at most `size` entries; a short text has pairs for fewer.

    Equal documents give equal files, on any number of threads.
    """
    tokenizers = _import_package(f"bpe:{size}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    try:
        tokenizer.train_from_iterator(strings, trainer)
    except UnicodeEncodeError as error:
        raise UsageError(_describe_half_character([error.object], "the text")) from None
    return HfTokenizer(f"bpe:{size}", tokenizer.to_str(), special_tokens)


def _import_package(name: str):
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UsageError(f"tokenizer={name} {NEEDS}, or take tokenizer=bytes, which needs nothing") from None
    return tokenizers
