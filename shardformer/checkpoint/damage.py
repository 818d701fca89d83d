"""The failure that an older checkpoint may not have."""

from shardformer.errors import RunError


class Damaged(RunError):
    """This checkpoint cannot be trusted; an older one may be intact."""
