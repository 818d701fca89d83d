"""tiny_shakespeare through TensorFlow Datasets: downloaded or imported from a file, and read."""

import contextlib
import hashlib
import io
import logging
import os
import re
import tempfile
import threading
from pathlib import Path

from shardformer.data.tensorflow import import_tensorflow
from shardformer.data.tokens import SPLITS
from shardformer.errors import RunError, UsageError
from shardformer.files import open_regular

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SIZE = 1_115_394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PROBE_SECONDS = 6
NAME = "tiny_shakespeare"
# Without a namespace such as huggingface:, whose data sets run code from elsewhere.
TFDS_NAME = re.compile(r"\w+(/[\w.-]+)?(:\d+\.\d+\.\d+)?", re.ASCII)


def load_splits() -> tuple[str, str, str]:
    """Returns the train, validation and test splits; raises UsageError with the alternatives if there are none."""
    if not is_prepared():
        # TFDS retries for minutes if nothing answers.
        if not can_download():
            raise UsageError(_list_alternatives(f"{URL} cannot be reached"))
        try:
            _prepare()
        except (UsageError, RunError):
            raise
        except Exception as error:  # whatever TFDS or the network raises, the advice is the same
            raise UsageError(_list_alternatives(f"the download failed ({type(error).__name__}: {error})")) from error
    return _read_splits()


def load_tfds_splits(name: str, field: str) -> tuple[str, str, str]:
    """Returns the train, validation and test text of a data set; a split that it does not have is empty."""
    if not TFDS_NAME.fullmatch(name):
        raise UsageError(f"data=tfds:{name} takes NAME, NAME/CONFIG or NAME:VERSION of a data set in TFDS itself")
    import_tensorflow()
    import tensorflow_datasets as tfds

    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        builder = tfds.builder(name, data_dir=data_dir())
        if not builder.is_prepared():
            builder.download_and_prepare()
    except Exception as error:  # whatever TFDS or the network raises
        raise UsageError(f"data=tfds:{name} cannot be prepared ({type(error).__name__}: {str(error)[:300]})") from None
    if field not in builder.info.features:
        raise UsageError(
            f"data=tfds:{name} has no text under {field!r}; it has {', '.join(builder.info.features)}: give text=NAME"
        )

    def read(split: str) -> str:
        if split not in builder.info.splits:
            return ""
        return "\n\n".join(example[field].decode() for example in builder.as_dataset(split=split).as_numpy_iterator())

    try:
        return read(SPLITS[0]), read(SPLITS[1]), read(SPLITS[2])
    except (AttributeError, UnicodeDecodeError) as error:  # of a number, an image, other bytes
        raise UsageError(f"data=tfds:{name}: {field!r} is not UTF-8 text ({error}); give text=NAME") from None


def data_dir() -> str:
    """Returns the folder of TFDS on this machine, which may be a bucket."""
    return os.path.expanduser(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def is_prepared() -> bool:
    return _make_builder(data_dir()).is_prepared()


def can_download(url: str = URL, seconds: float = PROBE_SECONDS) -> bool:
    """Returns whether the address of the file answers in time."""
    import requests  # what TFDS itself downloads with: the same proxies and certificates

    answers = []

    def ask():
        with contextlib.suppress(Exception):  # whatever went wrong, there was no answer
            answers.append(requests.head(url, timeout=seconds, allow_redirects=True).ok)

    # The timeout of requests does not cover a name server that never answers.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers == [True]


def import_shakespeare(path: str | Path) -> Path:
    """Checks a copy of input.txt and prepares the data set from it, offline; returns its folder."""
    try:
        with open_regular(Path(path)) as file:
            original = file.read(SIZE + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; the text of tiny_shakespeare is at {URL}") from None
    digest = hashlib.sha256(original).hexdigest()
    if digest != SHA256:
        got = f"{len(original):,} bytes with {digest}" if len(original) <= SIZE else "more bytes"
        raise UsageError(
            f"{path} is not tiny_shakespeare's input.txt: expected {SIZE:,} bytes with sha256 {SHA256}, got "
            f"{got}; take it from {URL}, or train on your file as it is: data={path}"
        )
    if not is_prepared():
        _prepare(original)
    return Path(_make_builder(data_dir()).data_dir)


def _prepare(original: bytes | None = None) -> None:
    """Makes the data set from `original`, or from a download.

    It is written to a private folder and then renamed: concurrent runs see a complete data set or none.
    """
    import_tensorflow()
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    with _make_private_folder() as folder:
        if original is not None:
            (Path(folder) / "input.txt").write_bytes(original)
        builder = _make_builder(folder)
        config = tfds.download.DownloadConfig(manual_dir=folder, try_download_gcs=False)
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS would announce the temporary folder
            builder.download_and_prepare(download_dir=Path(folder) / "downloads", download_config=config)
        _publish(Path(builder.data_dir), Path(data_dir()) / Path(builder.data_dir).relative_to(folder))


def _make_private_folder() -> tempfile.TemporaryDirectory:
    if "://" in data_dir():
        raise UsageError(
            f"cannot prepare {NAME} in a bucket ({data_dir()}): prepare it in a local folder (set TFDS_DATA_DIR) and "
            f"copy {NAME}/ into the bucket"
        )
    try:
        os.makedirs(data_dir(), exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="incomplete.", dir=data_dir())
    except OSError as error:
        raise UsageError(
            f"cannot prepare {NAME} in {data_dir()} ({error.strerror}); set TFDS_DATA_DIR to a folder to write in"
        ) from None


def _publish(created: Path, finished: Path) -> None:
    finished.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(created, finished)
    except OSError as error:
        if not is_prepared():  # otherwise another process was faster, with the same data
            raise RunError(f"cannot move the data set to {finished} ({error.strerror}); delete that folder") from None


def _read_splits() -> tuple[str, str, str]:
    import_tensorflow()
    builder = _make_builder(data_dir())
    with _naming_damage(builder.data_dir):
        train, validation, test = (
            next(builder.as_dataset(split=split).as_numpy_iterator())["text"].decode() for split in SPLITS
        )
    if hashlib.sha256((train + validation + test).encode()).hexdigest() != SHA256:
        raise RunError(f"{builder.data_dir} is not tiny_shakespeare: its sha256 differs; delete that folder")
    return train, validation, test


def _make_builder(folder: str):
    # It logs every folder that does not exist yet.
    logging.getLogger("absl").setLevel(logging.ERROR)
    import tensorflow_datasets as tfds

    with _naming_damage(os.path.join(folder, NAME)):
        return tfds.builder(NAME, data_dir=folder)


@contextlib.contextmanager
def _naming_damage(folder: str):
    try:
        yield
    except Exception as error:  # a damaged cache raises as many types of errors as TFDS has parsers
        raise RunError(f"cannot read {folder} ({type(error).__name__}: {error}); delete that folder") from error


def _list_alternatives(reason: str) -> str:
    return (
        f"tiny_shakespeare is not available: it is not prepared in {data_dir()}, and {reason}. You can:\n"
        f"  - copy {NAME}/ from another machine's TFDS cache (~/tensorflow_datasets there) into {data_dir()}\n"
        "  - bring a copy of that input.txt and run: python -m shardformer data import input.txt\n"
        "  - train on any UTF-8 text file: data=PATH"
    )
