"""Hugging Face's tokenizers: any `tokenizer.json`, and byte-level BPE trained on the corpus, offline.

The package `tokenizers` does the work, not code of ours: a tokenizer.json holds any of a dozen pre-tokenizers, models
and normalizers, and only the code that wrote it gives the same ids for all of them. It encodes in parallel, in Rust.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from shardformer.data.text_files import cut_text
from shardformer.data.vocabulary import FILE, Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.files import read_text

COPY = "tokenizer.json"
MAX_FILE = 256 << 20  # bytes; the largest public ones have 35 MB
END_OF_TEXT = "<|endoftext|>"
OTHER_ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
NEEDS = "needs the package tokenizers; install it: pip install tokenizers"


class HfTokenizer(Vocabulary):
    def __init__(self, name: str, text: str, special_tokens: bool = False):
        """`text` is that of a tokenizer.json. special_tokens: '<|endoftext|>' in a text is its id, not its letters."""
        self.name, self.text, self.special_tokens = name, text, special_tokens
        self._tokenizer = _import_package(name).Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_tokens
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(self._ids.values(), default=-1) + 1
        if not self._size:
            raise ValueError("its vocabulary is empty")
        self.end_of_text = next((self._ids[end] for end in (END_OF_TEXT, *OTHER_ENDS) if end in self._ids), None)
        added = self._tokenizer.encode("", add_special_tokens=True).ids
        self.first_id = added[0] if len(added) == 1 and added[0] != self.end_of_text else None

    def __len__(self) -> int:
        return self._size

    def with_special_tokens(self) -> "HfTokenizer":
        return self if self.special_tokens else HfTokenizer(self.name, self.text, special_tokens=True)

    def __eq__(self, other) -> bool:
        return isinstance(other, HfTokenizer) and self.record == other.record

    def __hash__(self) -> int:
        return hash(self.sha256)

    @functools.cached_property
    def record(self) -> dict:
        """Its name is left out: the same file may lie elsewhere."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"tokenizer": "tokenizer.json", "sha256": digest, "special_tokens": self.special_tokens}

    def documents(self, *, source: str, fingerprint: str) -> dict[str, str]:
        record = self.record | {"name": self.name, "source": source, "fingerprint": fingerprint}
        return {FILE: json.dumps(record, indent=2) + "\n", COPY: self.text}

    def encode(self, text: str, source: str = "text") -> np.ndarray:
        """A long text in pieces, which are encoded by all cores."""
        pieces = cut_text(text) if self._is_byte_level else [text]
        return np.concatenate(self.encode_all(pieces, source))

    def encode_all(self, texts: list[str], source: str = "text") -> list[np.ndarray]:
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeError):  # the only strings that it cannot take
            raise UsageError(_describe_half_character(texts, source)) from None
        return [np.array(encoding.ids, np.int32) for encoding in found]

    @property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in self.text

    def decode(self, ids) -> str:
        return self._tokenizer.decode(self._check_ids(ids).tolist(), skip_special_tokens=False)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """One piece an id, empty while a character is incomplete."""
        stream = _import_package(self.name).decoders.DecodeStream(skip_special_tokens=False)
        waiting = []
        for token in ids:
            piece = stream.step(self._tokenizer, token)
            waiting = [] if piece else [*waiting, token]
            yield piece or ""
        yield self.decode(waiting)

    def byte_lengths(self) -> np.ndarray | None:
        """Of a byte-level tokenizer a token's letters are its bytes; what separates documents stands for none."""
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


def _describe_half_character(texts: Iterable[str], source: str) -> str:
    lone = next(c for text in texts for c in text if "\ud800" <= c <= "\udfff")
    return f"{source}: {lone!r} is half of a character (a lone surrogate); remove it"


def open_file(path: Path, special_tokens: bool = False) -> HfTokenizer:
    """The tokenizer of a tokenizer.json, or of the folder that holds one."""
    path = path / COPY if path.is_dir() else path
    _import_package(str(path))
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


def load_copy(folder: Path, record: dict) -> HfTokenizer:
    """The tokenizer kept beside a vocabulary.json; refuses one that is not the one it names."""
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
    return _parse(str(record["name"]), text, bool(record["special_tokens"]))


def _parse(name: str, text: str, special_tokens: bool) -> HfTokenizer:
    """ValueError where it is none: the package raises plain Exceptions, and its panics are not even those."""
    try:
        return HfTokenizer(name, text, special_tokens)
    except (UsageError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{error!s:.200}") from None


def train_bpe(texts: Iterable[str], size: int, special_tokens: bool = False) -> HfTokenizer:
    """Byte-level BPE with GPT-2's way to cut words, of at most `size` entries: fewer where the text has no more pairs.

    The same texts give the same file, on any number of threads.
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
        tokenizer.train_from_iterator(texts, trainer)
    except UnicodeError as error:
        raise UsageError(_describe_half_character([error.object], "the text")) from None
    return HfTokenizer(f"bpe:{size}", tokenizer.to_str(), special_tokens)


def _import_package(name: str):
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UsageError(f"tokenizer={name} {NEEDS}, or take tokenizer=bytes, which needs nothing") from None
    return tokenizers
