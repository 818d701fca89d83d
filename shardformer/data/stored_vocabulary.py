"""The vocabulary that is saved with every run and every prepared corpus: `vocabulary.json`, `tokenizer.json`."""

import json
from pathlib import Path

from shardformer.data.vocabulary import FILE, Bytes, Characters, TokenIds, Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.files import read_text

TOKENIZER_FOLDER = "tokenizer"  # the folder of a run with the tokenizer files of Hugging Face that it came with


def load_vocabulary(folder: Path) -> tuple[Vocabulary, str]:
    """Loads the vocabulary of a folder and the fingerprint of its data."""
    from shardformer.data.chat.chat_format import load_format  # not imported for a new run

    folder = Path(folder)
    record = _read_record(folder)
    try:
        vocabulary = _make_from_record(record, folder).with_chat(load_format(folder))
        return vocabulary, record["fingerprint"]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RunError(_describe_damage(folder / FILE, error)) from None


def _make_from_record(record: dict, folder: Path) -> Vocabulary:
    if "characters" in record:
        return Characters(record["characters"], str(folder))
    if record["tokenizer"] == Bytes.name:
        return Bytes()
    if record["tokenizer"] == TokenIds.name:
        return TokenIds(record["size"])
    from shardformer.data import hf_tokenizer  # not imported for characters

    return hf_tokenizer.load_copy(folder, record)


def check_same_data(folder: Path, *, source: str, fingerprint: str) -> None:
    """Raises UsageError if a run started with other data."""
    started_with = _read_record(folder)
    if started_with["fingerprint"] not in ("", fingerprint):  # a converted model has seen no data of ours
        same_name = started_with["source"] == source
        raise UsageError(
            f"data={source} is not what {folder} was trained on: that was {started_with['source']} with fingerprint "
            f"{started_with['fingerprint'][:12]}, this has {fingerprint[:12]}"
            f"{', so what the file holds or validation= has changed' if same_name else ''}"
            "; bring the old data back or start a new run"
        )


def _read_record(folder: Path) -> dict:
    path = Path(folder) / FILE
    try:
        record = json.loads(read_text(path))
        if not ({"characters", "tokenizer"} & record.keys()):
            raise ValueError("it names neither characters nor a tokenizer")
        return record | {key: str(record[key]) for key in ("source", "fingerprint")}
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(_describe_damage(path, error)) from None


def _describe_damage(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({type(error).__name__}: {error}); every step_ folder of a run holds a copy"
