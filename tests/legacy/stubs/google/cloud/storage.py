"""A client whose buckets are the folders under $BUCKETS."""

import os
from pathlib import Path


class Blob:
    def __init__(self, bucket, file):
        self.file, self.name = file, file.relative_to(bucket).as_posix()

    def delete(self):
        self.file.unlink()


class Client:
    def list_blobs(self, bucket, prefix):
        folder = Path(os.environ["BUCKETS"], bucket)
        return [Blob(folder, file) for file in (folder / prefix).rglob("*") if file.is_file()]
