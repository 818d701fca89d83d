"""Characters to token ids and back."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from shardformer.errors import RunError, UsageError

FILE = "vocabulary.json"  # in every run and checkpoint: the characters, and of which data they are
MAX_NAMED = 12  # unknown characters in one message


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The characters a model knows, sorted; a character's token id is its place among them."""

    characters: str
    owner: str = dataclasses.field(default="the vocabulary", compare=False)  # whose characters an error calls them

    def __post_init__(self):
        if not self.characters or list(self.characters) != sorted(set(self.characters)):
            raise ValueError(f"a vocabulary is sorted, distinct characters, at least one; got {self.characters!r}")

    @classmethod
    def from_text(cls, text: str) -> "Vocabulary":
        if not text:
            raise UsageError("an empty text has no vocabulary; give at least one character")
        return cls("".join(sorted(set(text))), "the train split")

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str, source: str = "text") -> np.ndarray:
        """`text` as int32 token ids; `source` is what an error calls the text."""
        known, wanted = _code_points(self.characters), _code_points(text)
        ids = np.searchsorted(known, wanted).astype(np.int32)
        unknown = np.flatnonzero(known[np.minimum(ids, len(known) - 1)] != wanted)
        if unknown.size:
            raise UsageError(self._describe_unknown(text, unknown, source))
        return ids

    def decode(self, ids) -> str:
        ids = np.asarray(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self):
            raise ValueError(f"token ids lie in 0..{len(self) - 1}, got {ids.min()}..{ids.max()}")
        return _code_points(self.characters)[ids.astype(np.int64)].tobytes().decode("utf-32-le", "surrogatepass")

    def document(self, *, source: str, fingerprint: str) -> str:
        """The text of vocabulary.json."""
        record = {"characters": self.characters, "source": source, "fingerprint": fingerprint}
        return json.dumps(record, indent=2) + "\n"

    @classmethod
    def load(cls, folder: Path) -> tuple["Vocabulary", str]:
        """A run's vocabulary, and the fingerprint of the data that it is of."""
        record = _read_record(folder)
        try:
            return cls(record["characters"], str(folder)), record["fingerprint"]
        except ValueError as error:
            raise RunError(_describe_damage(Path(folder) / FILE, error)) from None

    def _describe_unknown(self, text: str, unknown: np.ndarray, source: str) -> str:
        """The first unknown character with its place, and all that there are; `unknown` holds indices of the text."""
        index = int(unknown[0])
        line_start = text.rfind("\n", 0, index) + 1
        line = text.count("\n", 0, index) + 1
        first = text[index]
        missing = sorted({text[place] for place in unknown})
        named = " ".join(map(repr, missing[:MAX_NAMED])) + (" ..." if len(missing) > MAX_NAMED else "")
        it, all_of_them = ("them", f" ({len(missing)} are not: {named})") if len(missing) > 1 else ("it", "")
        return (
            f"{source}: character {first!r} (U+{ord(first):04X}) at index {index} (line {line}, column "
            f"{index - line_start + 1}) is not among the {len(self)} characters of {self.owner}{all_of_them}; "
            f"replace {it}, or choose another text"
        )


def check_same_data(folder: Path, *, source: str, fingerprint: str) -> None:
    """Refuses to continue a run on other data than it began with."""
    began_with = _read_record(folder)
    if began_with["fingerprint"] != fingerprint:
        raise UsageError(
            f"data={source} is not what {folder} was trained on: that was {began_with['source']} with fingerprint "
            f"{began_with['fingerprint'][:12]}, this has {fingerprint[:12]}; bring the old data back or start a new run"
        )


def _read_record(folder: Path) -> dict[str, str]:
    path = Path(folder) / FILE
    try:
        record = json.loads(path.read_text())
        return {key: str(record[key]) for key in ("characters", "source", "fingerprint")}
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(_describe_damage(path, error)) from None


def _describe_damage(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({type(error).__name__}: {error}); every step_ folder of a run holds a copy"


def _code_points(text: str) -> np.ndarray:
    # A prompt from the command line can hold lone surrogates: let them through, to be named as unknown.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
