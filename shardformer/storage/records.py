"""The small files of a run in a bucket (settings, metrics, curves, events): written locally, uploaded at each save."""

from pathlib import Path

from shardformer.files import make_folder, replacing
from shardformer.storage import bucket
from shardformer.storage.bucket_path import BucketPath, local_folder

_RECORDS = ("config.json", "vocabulary.json", "metrics.csv", "gradients.csv", "curves.png", "final.json")
_EVENTS = "tensorboard/"


def upload_records(place: Path | BucketPath) -> None:
    """Nothing to do for a run on a disk: its records are there already."""
    if isinstance(place, Path):
        return
    folder = local_folder(place)
    for path in _local_records(folder):
        (place / path.relative_to(folder).as_posix()).write_bytes(path.read_bytes())


def download_records(place: Path | BucketPath) -> Path:
    """The local folder with the records as the bucket has them: those of an earlier use of this machine may be old."""
    folder = local_folder(place)
    if isinstance(place, Path):
        return folder
    found = [name for name in bucket.list_objects(place) if name in _RECORDS or name.startswith(_EVENTS)]
    for name in found:
        make_folder((folder / name).parent)
        with replacing(folder / name) as temporary:
            temporary.write_bytes((place / name).read_bytes())
    for path in _local_records(folder):
        if path.relative_to(folder).as_posix() not in found:
            path.unlink(missing_ok=True)
    return folder


def _local_records(folder: Path) -> list[Path]:
    return [path for path in (*map(folder.joinpath, _RECORDS), *folder.glob(f"{_EVENTS}*")) if path.is_file()]
