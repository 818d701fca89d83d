"""A prepared corpus: a folder of token files with an index, which is there when all of it is."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from shardformer.data.tokens import SPLITS, MappedFile, Split, Tokens, id_type
from shardformer.data.vocabulary import FILE as VOCABULARY
from shardformer.data.vocabulary import Vocabulary, load_vocabulary
from shardformer.errors import RunError
from shardformer.files import open_regular, read_text

INDEX = "index.json"
FORMAT = 1
MAX_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class TokenFolder:
    path: Path
    index: dict
    vocabulary: Vocabulary

    @staticmethod
    def is_folder(path: Path) -> bool:
        return (path / INDEX).is_file() and (path / VOCABULARY).is_file()

    @staticmethod
    def open(path: Path) -> "TokenFolder":
        """Checks that everything that the index names is there, at its size."""
        try:
            index = json.loads(read_text(path / INDEX, MAX_BYTES))
            _check_index(index)
            vocabulary, _ = load_vocabulary(path)
            found = TokenFolder(path, index, vocabulary)
            found.check_sizes()
        except OSError as error:
            raise RunError(f"cannot read {path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{path / INDEX} is damaged ({type(error).__name__}: {error!s:.200}); delete the folder and prepare it "
                "again"
            ) from None
        return found

    @property
    def fingerprint(self) -> str:
        return self.index["fingerprint"]

    @property
    def has_prompts(self) -> bool:
        return self.index["prompts"]

    def check_sizes(self) -> None:
        size = id_type(len(self.vocabulary)).itemsize
        for split in self.index["splits"].values():
            for part in split["parts"]:
                path = self.path / part["file"]
                found = path.stat().st_size if path.exists() else None
                if found != part["tokens"] * size:
                    raise RunError(
                        f"{path} is {'missing' if found is None else f'{found:,} bytes long'}, expected "
                        f"{part['tokens'] * size:,} bytes; delete the folder and prepare it again"
                    )

    def check_contents(self) -> None:
        """Reads all tokens, and raises where a part has another checksum than the index says."""
        for part in (part for split in self.index["splits"].values() for part in split["parts"]):
            with open(self.path / part["file"], "rb") as file:
                got = hashlib.file_digest(file, "sha256").hexdigest()
            if got != part["sha256"]:
                raise RunError(
                    f"{part['file']} is damaged: it has the sha256 {got[:12]}, expected {part['sha256'][:12]}; "
                    "copy it again, or prepare the folder again"
                )

    def split(self, name: str) -> Split:
        parts, dtype = self.index["splits"][name]["parts"], id_type(len(self.vocabulary))
        files = [MappedFile(self.path / part["file"], dtype, part["tokens"]) for part in parts if part["tokens"]]
        tokens = Tokens(files, str(self.path))
        if not self.index["has_documents"]:
            return Split(tokens)
        return Split(tokens, self._load(name, "ends"), self._load(name, "prompts") if self.has_prompts else None)

    def splits(self) -> dict[str, Split]:
        return {name: self.split(name) for name in SPLITS if self.index["splits"][name]["tokens"]}

    def _load(self, split: str, what: str) -> np.ndarray:
        path = self.path / f"{split}.{what}.npy"
        try:
            with open_regular(path):  # a pipe would never end
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.dtype.kind not in "iu" or array.shape != (self.index["splits"][split]["documents"],):
                raise ValueError(f"it has {array.dtype} of shape {array.shape}")
        except Exception as error:  # numpy parses headers as Python
            raise RunError(f"{path} is damaged ({error!s:.200}); delete the folder and prepare it again") from None
        return array


def _check_index(index) -> None:
    """Raises for whatever in a damaged index would raise later, where it is used and nothing catches it."""
    if index["format"] != FORMAT:
        raise ValueError(f"format {index['format']!r:.80}, this version reads {FORMAT}")
    _need(isinstance(index["fingerprint"], str), "fingerprint")
    _need(all(isinstance(index[name], bool) for name in ("has_documents", "prompts")), "has_documents or prompts")
    for name in SPLITS:
        split = index["splits"][name]
        _need(all(_is_count(split[key]) for key in ("tokens", "documents", "bytes")), f"splits/{name}")
        for part in split["parts"]:
            file = part["file"]
            _need(Path(file).name == file and len(file) < 100 and _is_count(part["tokens"]), f"splits/{name}/parts")
        _need(sum(part["tokens"] for part in split["parts"]) == split["tokens"], f"splits/{name}/tokens")
    for source in index["sources"]:
        _need(isinstance(source["path"], str), "sources")
        _need(all(_is_count(source[key]) for key in ("bytes", "tokens")), "sources")


def _need(holds: bool, place: str) -> None:
    if not holds:
        raise ValueError(f"impossible value in {place}")


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**63
