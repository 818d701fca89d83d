"""Keys of the guard against bad steps: which steps are left out, and when a run goes back to a checkpoint."""

import dataclasses

from shardformer.config.keys import KeyGroup, key

SKIP_LIMIT = 5  # left-out steps in a row after which the run goes back to a checkpoint
ROLLBACKS = 3  # times that a run goes back; the next time it ends


@dataclasses.dataclass(frozen=True)
class BadStepKeys(KeyGroup):
    """Bad steps"""

    skip_steps: float = key(
        0.0, "leave out steps whose loss or gradient norm is this many deviations above the median; 0: none", least=0
    )
    skip_window: int = key(
        128, "last applied steps whose median and deviation are taken; until then no bound", least=8, needs="skip_steps"
    )
