"""A prepared corpus: a folder of token files with an index, which is written last."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from shardformer.data.chat.chat_windows import ChatSplit
from shardformer.data.chat.preference_windows import PreferenceSplit
from shardformer.data.digests import PREPARED, digest_files
from shardformer.data.row_report import RowReport
from shardformer.data.stored_vocabulary import load_vocabulary
from shardformer.data.tokens import SPLITS, MappedFile, Tokens, id_type
from shardformer.data.vocabulary import FILE as VOCABULARY
from shardformer.data.vocabulary import Vocabulary
from shardformer.data.windows import Split
from shardformer.errors import RunError
from shardformer.files import open_regular, read_text

INDEX = "index.json"
FORMAT = 2
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
            result = TokenFolder(path, index, vocabulary)
            result.check_sizes()
        except OSError as error:
            raise RunError(f"cannot read {path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{path / INDEX} is damaged ({type(error).__name__}: {error!s:.200}); delete the folder and prepare it "
                "again"
            ) from None
        return result

    @property
    def fingerprint(self) -> str:
        """Identifies the vocabulary, the tokens, and the borders of documents and prompts."""
        return self.index["fingerprint"]

    @property
    def has_prompts(self) -> bool:
        return self.index["prompts"]

    @property
    def has_chat(self) -> bool:
        """Returns whether the documents are conversations, with loss masks."""
        return self.index.get("chat", False)

    @property
    def has_pairs(self) -> bool:
        """Returns whether the documents are the sides of preference pairs."""
        return self.index.get("pairs", False)

    @property
    def has_masks(self) -> bool:
        """Returns whether each file of ids has a mask of the tokens with a loss."""
        return self.has_chat or self.has_pairs

    @property
    def rows(self) -> RowReport:
        """The rows that were left out or changed when the folder was prepared."""
        return RowReport.from_json(self.index.get("rows", {}))

    def check_sizes(self) -> None:
        size = id_type(len(self.vocabulary)).itemsize
        for split in self.index["splits"].values():
            for part in split["parts"]:
                _check_size(self.path / part["file"], part["tokens"] * size)
                if self.has_masks:
                    _check_size(mask_path(self.path / part["file"]), part["tokens"])

    def check_contents(self, *, remembered: bool = False) -> None:
        """Compares all files with the index. Files that have not changed since they were read are not read again if
        `remembered` is true."""
        parts = [part for split in self.index["splits"].values() for part in split["parts"]]
        files = [self.path / part["file"] for part in parts]
        paths = [path for file in files for path in ([file, mask_path(file)] if self.has_masks else [file])]
        expected = digests_of(parts)
        result = digest_files(paths, remembered=remembered)
        if remembered and result != expected:
            result = digest_files(paths, remembered=False)  # what is remembered may be damaged, too
        for path, got, wanted in zip(paths, result, expected, strict=True):
            if got != wanted:
                raise RunError(
                    f"{path} is damaged: it has the sha256 {got[:12]}, expected {wanted[:12]}; copy it again, or "
                    "delete the folder and prepare it again"
                )
        if self._compute_fingerprint() != self.fingerprint:
            raise RunError(
                f"{self.path} is damaged: index.json, vocabulary.json, *.ends.npy and *.prompts.npy do not belong to "
                f"each other (fingerprint {self.fingerprint[:12]}); copy them again, or prepare the folder again"
            )

    def _compute_fingerprint(self) -> str:
        contents = []
        for name in SPLITS:
            prompts = self._load(name, "prompts") if self.has_prompts else None
            parts = digests_of(self.index["splits"][name]["parts"])
            contents.append(SplitContent(name, parts, self._load(name, "ends"), prompts))
        return compute_fingerprint(self.vocabulary, contents)

    def split(self, name: str) -> Split | ChatSplit:
        parts, dtype = self.index["splits"][name]["parts"], id_type(len(self.vocabulary))
        sizes = {self.path / part["file"]: part["tokens"] for part in parts if part["tokens"]}
        tokens = Tokens([MappedFile(path, dtype, size) for path, size in sizes.items()], str(self.path))
        if self.has_masks:
            make = PreferenceSplit if self.has_pairs else ChatSplit
            masks = [MappedFile(mask_path(path), np.dtype(np.uint8), size) for path, size in sizes.items()]
            return make(tokens, self._load(name, "ends"), Tokens(masks, str(self.path)))
        if not self.index["has_documents"]:
            return Split(tokens)
        return Split(tokens, self._load(name, "ends"), self._load(name, "prompts") if self.has_prompts else None)

    def splits(self) -> dict[str, Split | ChatSplit]:
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


@dataclasses.dataclass(frozen=True)
class SplitContent:
    """The parts of a fingerprint that one split gives."""

    name: str
    digests: list[str]  # of its token files
    ends: np.ndarray
    prompts: np.ndarray | None


def mask_path(tokens: Path) -> Path:
    """Returns the file next to a file of ids that has one byte an id: whether it has a loss."""
    return tokens.with_suffix(".mask")


def digests_of(parts: list[dict]) -> list[str]:
    """Returns the sha256 of every file of these parts of an index: ids, and masks where there are any."""
    return [part[name] for part in parts for name in ("sha256", "mask_sha256") if name in part]


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != expected:
        raise RunError(
            f"{path} is {'missing' if size is None else f'{size:,} bytes long'}, expected {expected:,} bytes; "
            "delete the folder and prepare it again"
        )


def compute_fingerprint(vocabulary: Vocabulary, splits: list[SplitContent]) -> str:
    """Returns a sha256 of the vocabulary, the tokens and the borders."""
    fingerprint = hashlib.sha256(vocabulary.sha256.encode())
    for split in splits:
        for digest in split.digests:
            fingerprint.update(f"{split.name} {digest} ".encode())
        fingerprint.update(np.asarray(split.ends, np.int64).tobytes())
        if split.prompts is not None:
            fingerprint.update(np.asarray(split.prompts, np.int32).tobytes())
    return PREPARED + fingerprint.hexdigest()


def _check_index(index) -> None:
    """Raises for every value in a damaged index that would raise later, where nothing catches it."""
    if index["format"] != FORMAT:
        raise ValueError(f"format {index['format']!r:.80}, this version reads {FORMAT}")
    _need(isinstance(index["fingerprint"], str), "fingerprint")
    _need(all(isinstance(index[name], bool) for name in ("has_documents", "prompts")), "has_documents or prompts")
    has_chat = index.get("chat", False)
    has_pairs = index.get("pairs", False)
    _need(isinstance(has_chat, bool) and isinstance(has_pairs, bool), "chat or pairs")
    for name in SPLITS:
        split = index["splits"][name]
        _need(all(_is_count(split[key]) for key in ("tokens", "documents", "bytes")), f"splits/{name}")
        _need(not has_pairs or split["documents"] % 2 == 0, f"splits/{name}/documents")
        for part in split["parts"]:
            file = part["file"]
            _need(Path(file).name == file and len(file) < 100 and _is_count(part["tokens"]), f"splits/{name}/parts")
            _need(isinstance(part["sha256"], str), f"splits/{name}/parts")
            _need(isinstance(part.get("mask_sha256"), str) == (has_chat or has_pairs), f"splits/{name}/parts")
        _need(sum(part["tokens"] for part in split["parts"]) == split["tokens"], f"splits/{name}/tokens")
    RowReport.from_json(index.get("rows", {}))
    for source in index["sources"]:
        _need(isinstance(source["path"], str), "sources")
        _need(all(_is_count(source[key]) for key in ("bytes", "tokens")), "sources")


def _need(holds: bool, location: str) -> None:
    if not holds:
        raise ValueError(f"impossible value in {location}")


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**63
