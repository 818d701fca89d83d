"""The guard against bad steps: it leaves steps out, goes back to a checkpoint, and names non-finite layers."""

from shardformer.guard.going_back import Stuck, go_back
from shardformer.guard.non_finite import describe_first_non_finite
from shardformer.guard.rolling_bound import judge, note, start_record
from shardformer.guard.skip_log import SkipLog

__all__ = ["SkipLog", "Stuck", "describe_first_non_finite", "go_back", "judge", "note", "start_record"]
