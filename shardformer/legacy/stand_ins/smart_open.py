"""smart_open where neither it nor Google's client is installed: compressed files and other schemes need the package."""

import builtins

from shardformer.legacy.stand_ins import buckets


def _open_plain(uri, *arguments, transport_params=None, **options):
    """Opens a file. `transport_params` is for the client of a bucket, which is a folder here."""
    name = str(uri)
    if "://" in name or name.endswith((".gz", ".bz2", ".xz", ".zst")):
        raise NotImplementedError(
            f"{name}: expected an uncompressed file, local or of gs://; pip install smart_open for others"
        )
    return builtins.open(uri, *arguments, **options)


open = buckets.opener(_open_plain)
