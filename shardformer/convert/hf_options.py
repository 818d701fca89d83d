"""The keys of a Hugging Face folder. Imports no JAX: `train --help` prints them at once."""

import dataclasses

from shardformer.config.keys import key


@dataclasses.dataclass(frozen=True)
class FromHf:
    """A Hugging Face folder (every key of a run is taken as well)."""

    ignore_config: str = key("", "keys of config.json, separated by commas, that are to be ignored")

    @property
    def ignored(self) -> list[str]:
        return [name for name in self.ignore_config.split(",") if name]
