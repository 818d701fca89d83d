"""The records of a run in a bucket (settings, metrics, curves, events): written locally, uploaded at each save."""

from pathlib import Path

from shardformer.files import make_folder, replacing
from shardformer.storage import bucket
from shardformer.storage.bucket_path import BucketPath, local_folder, reading_folder

_uploaded: dict[BucketPath, tuple[int, int]] = {}  # size and time of the records that this process has uploaded


def upload_records(path: Path | BucketPath) -> None:
    """Uploads the records that changed since the last upload; does nothing for a run on a disk."""
    if isinstance(path, BucketPath):
        folder = local_folder(path)
        for name in _list_local(folder):
            stat = (folder / name).stat()
            state = (stat.st_size, stat.st_mtime_ns)
            if _uploaded.get(path / name) != state:
                (path / name).write_bytes((folder / name).read_bytes())
                _uploaded[path / name] = state


def read_records(path: Path | BucketPath) -> Path:
    """Returns a folder with a run's records: the run folder on a disk, or a fresh copy of a bucket's."""
    folder = reading_folder(path)
    download_records(path, folder)
    return folder


def download_records(path: Path | BucketPath, folder: Path) -> None:
    """Makes the records in a local folder equal to those in the bucket; deletes all other files."""
    if isinstance(path, BucketPath):
        result = [name for name in bucket.list_objects(path) if _is_record(name)]
        for name in result:
            make_folder((folder / name).parent)
            with replacing(folder / name) as temporary:
                temporary.write_bytes((path / name).read_bytes())
        for name in set(_list_local(folder)) - set(result):
            (folder / name).unlink(missing_ok=True)


def _list_local(folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [name for name in names if _is_record(name)]


def _is_record(name: str) -> bool:
    """Excludes checkpoints, the lock, temporary files and names with `..`."""
    return not name.startswith("step_") and all(part and not part.startswith(".") for part in name.split("/"))
