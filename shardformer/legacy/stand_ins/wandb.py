"""wandb as with WANDB_MODE=disabled: it accepts what is logged and keeps nothing."""

from collections.abc import Mapping
from typing import Any


def log(*_, **__) -> None:
    """Ignores what it is given."""


finish = watch = log


class Config(dict):
    """The settings of a run, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"wandb.config has no setting {name!r}; it has {', '.join(self) or 'none'}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, settings, **_) -> None:  # type: ignore[override]  # wandb's accepts options and no settings
        """Adds settings of a dictionary, or the attributes of parsed arguments."""
        super().update(settings if isinstance(settings, Mapping) else vars(settings))


class Run:
    """A run that is not recorded."""

    log = finish = watch = staticmethod(log)

    def __init__(self, settings: Any = None):
        self.config = Config()
        self.config.update({} if settings is None else settings)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


class Image:
    """A picture that is not stored."""

    def __init__(self, *_, **__):
        pass


class Histogram(Image):
    """A histogram that is not stored."""


class Table(Image):
    """A table that is not stored."""

    add_data = staticmethod(log)


run: Run | None = None
config = Config()


def init(*_, **options) -> Run:
    global run, config
    run = Run(options.get("config"))
    config = run.config
    return run
