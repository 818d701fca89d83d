"""smart_open over folders: buckets lie in the folder $BUCKETS, and any missing folder is made."""

import builtins
import os
from pathlib import Path

from google.cloud.exceptions import NotFound


def open(path, mode="r"):
    in_a_bucket = path.startswith("gs://")
    file = Path(os.environ["BUCKETS"], path[len("gs://") :]) if in_a_bucket else Path(path)
    if "w" in mode:
        file.parent.mkdir(parents=True, exist_ok=True)
    elif in_a_bucket and not file.exists():
        raise NotFound(path)
    return builtins.open(file, mode)
