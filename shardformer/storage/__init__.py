"""Files on a disk (`pathlib.Path`) or in a bucket (`gs://...`, `s3://...`)."""

from shardformer.storage.bucket_path import (
    BucketPath,
    cache_folder,
    is_path,
    is_same,
    is_url,
    local_folder,
    location,
    new_file_on_disk,
    on_disk,
    read_small,
    reading_folder,
)
from shardformer.storage.on_this_machine import download_records, local_path, read_records, upload_records

__all__ = ["BucketPath", "cache_folder", "download_records", "is_path", "is_same"]
__all__ += ["is_url", "local_folder", "local_path", "location", "new_file_on_disk", "on_disk", "read_records"]
__all__ += ["read_small", "reading_folder", "upload_records"]
