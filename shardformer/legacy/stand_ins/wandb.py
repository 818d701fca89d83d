"""wandb as with WANDB_MODE=disabled: it accepts what is logged and keeps nothing."""

from typing import Any


class Run:
    """A run that is not recorded."""

    def __init__(self, config: Any = None):
        self.config = {} if config is None else config

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def log(self, *_, **__) -> None:
        pass

    def finish(self, *_, **__) -> None:
        pass


run: Run | None = None


def init(*_, config: Any = None, **__) -> Run:
    global run
    run = Run(config)
    return run


def log(*_, **__) -> None:
    pass


def finish(*_, **__) -> None:
    pass
