"""The storage of the tests' checkpoints: a disk, a bucket in memory and, with emulators, S3 and GCS.

SHARDFORMER_EMULATORS names a Python that has moto[server] installed; without it buckets are only in memory.
"""

import functools
import itertools
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from obstore.store import MemoryStore

from shardformer.storage import BucketPath, bucket

EMULATORS = os.environ.get("SHARDFORMER_EMULATORS", "")
KINDS = ("disk", "memory", *(("s3", "gs") if EMULATORS else ()))
BUCKET = "checkpoints"
_numbers = itertools.count()
_open_bucket = bucket.open_bucket
_memory = functools.cache(lambda name: MemoryStore())


def open_bucket(scheme: str, name: str):
    """Replaces `bucket.open_bucket`: knows buckets in memory, too."""
    return _memory(name) if scheme == "memory" else _open_bucket(scheme, name)


def new_place(kind: str, tmp_path: Path):
    """A run folder that does not exist yet."""
    return tmp_path / "run" if kind == "disk" else BucketPath(kind, BUCKET, f"runs/{os.getpid()}-{next(_numbers)}")


def object_of(folder, name: str):
    """Returns the path of a checkpoint's file for a test to change; a small array file is one object in a bucket."""
    if isinstance(folder, Path) or name == "manifest.json":
        return folder / name
    return file_of(folder, name).parent / (f"{name}.00000" if name.endswith(".npy") else name)


def file_of(folder, name: str):
    """Returns the path of a checkpoint's file as messages print it."""
    if isinstance(folder, Path) or name == "manifest.json":
        return folder / name
    (subfolder,) = {key.partition("/")[0] for key in bucket.list_objects(folder) if "/" in key}
    return folder / subfolder / name


def copy(folder, target):
    if isinstance(folder, Path):
        return shutil.copytree(folder, target)
    for name in bucket.list_objects(folder):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def names_in(out) -> set[str]:
    """Returns the names in a run folder, hidden ones included."""
    if isinstance(out, Path):
        return {path.name for path in out.iterdir()}
    return {name.partition("/")[0] for name in bucket.list_objects(out)}


@functools.cache
def start_emulators() -> list[subprocess.Popen]:
    """Starts S3 and the stand-in for GCS, each with an empty bucket, and sets the environment to use them."""
    ports = [_free_port(), _free_port()]
    commands = (
        ["-m", "moto.server", "-p", str(ports[0])],
        [str(Path(__file__).parent / "gcs_stand_in.py"), str(ports[1])],
    )
    running = [
        subprocess.Popen([EMULATORS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for words in commands
    ]
    s3, gcs = (f"http://127.0.0.1:{port}" for port in ports)
    for url in (s3, gcs):
        _make_bucket(f"{url}/{BUCKET}")
    os.environ |= {"AWS_ENDPOINT_URL": s3, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "GOOGLE_ALLOW_HTTP": "true"}
    key = {"gcs_base_url": gcs, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    os.environ["GOOGLE_SERVICE_ACCOUNT_KEY"] = json.dumps(key)
    return running


def _make_bucket(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
