"""Where files are kept: on a disk (`pathlib.Path`) or in a bucket (`gs://...`, `s3://...`)."""

from shardformer.storage.bucket_path import BucketPath, is_same, is_url, local_folder, location
from shardformer.storage.records import download_records, upload_records

__all__ = ["BucketPath", "download_records", "is_same", "is_url", "local_folder", "location", "upload_records"]
