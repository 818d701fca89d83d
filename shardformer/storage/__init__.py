"""Where files are kept: on a disk (`pathlib.Path`) or in a bucket (`gs://...`, `s3://...`)."""

from shardformer.storage.bucket_path import BucketPath, cache_folder, is_same, is_url, local_folder, location
from shardformer.storage.records import download_records, upload_records

__all__ = ["BucketPath", "cache_folder", "download_records", "is_same", "is_url", "local_folder", "location"]
__all__ += ["upload_records"]
