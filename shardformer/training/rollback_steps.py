"""The checkpoints that a run may go back to. They depend on the step only, so that a resumed run finds the same."""

from collections.abc import Iterable

from shardformer.config import Config
from shardformer.config.bad_step_keys import SKIP_LIMIT


def is_scheduled(step: int, config: Config) -> bool:
    """Returns whether a checkpoint of this step is due by its number."""
    return any(every and step % every == 0 for every in (config.run.save_every, config.run.keep_every))


def select_earlier(steps: Iterable[int], before: int, config: Config) -> list[int]:
    """Returns the steps with a checkpoint by schedule before a step, the newest first."""
    return sorted((step for step in steps if step < before and is_scheduled(step, config)), reverse=True)


def select_needed(steps: list[int], config: Config) -> set[int]:
    """Returns the steps that a run at the newest step, or later, may go back to."""
    if not config.bad_steps.skip_steps or not steps:
        return set()
    oldest = select_earlier(steps, steps[-1] - SKIP_LIMIT, config)[:1] or [0]
    return {step for step in steps if step >= oldest[0] and is_scheduled(step, config)}
