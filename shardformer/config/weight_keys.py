"""Keys of the form in which a model's weights are stored while it generates, scores and evaluates."""

import dataclasses
from typing import Literal

from shardformer.config.keys import KeyGroup, key

MEANING = (
    "matrices and token tables on the devices; int8: a quarter of float32's bytes, with a float32 scale for each "
    "output channel; norms, biases, positions and adapters stay float"
)


@dataclasses.dataclass(frozen=True)
class WeightKeys(KeyGroup):
    """Quantised weights, for generation, scores and evaluation (never written to config.json)"""

    weights: Literal["float", "int8"] = key("float", MEANING)

    @property
    def quantized(self) -> bool:
        return self.weights != "float"
