"""The objective of multi-token prediction."""

import math
from typing import TYPE_CHECKING

from shardformer.config.keys import require
from shardformer.config.parsing import parse_mesh
from shardformer.objectives.objective import Objective

if TYPE_CHECKING:
    from shardformer.config.config import Config


class MultiToken(Objective):
    """The language model, and a module that predicts the token after the next: objective=mtp."""

    task = "shardformer.objectives.mtp_model:MtpModel"
    has_dense_reference = has_bound_of_bytes = False
    only_in_training = ("params/transformer/next", "average/transformer/next")

    def check(self) -> None:
        super().check()
        c = self.config
        require(
            self.keys.mtp_weight > 0,
            f"mtp_weight must be above 0, got {self.keys.mtp_weight}; give objective=lm for no second loss",
        )
        require(
            c.model.seq > 1,
            f"objective=mtp predicts the token after the next, which a row of seq={c.model.seq} does not have; give "
            "seq=2 or more",
        )
        require(
            not c.lora.lora_rank,
            f"objective=mtp trains a complete further layer, and lora_rank={c.lora.lora_rank} adapters only; give "
            "lora_rank=0",
        )
        require(
            not c.optimizer.searches_rate,
            f"objective=mtp has a second loss, which optimizer={c.optimizer.name} does not search with; give "
            "optimizer=adamw",
        )
        require(
            not c.model.scale,
            f"scale={c.model.scale} has no rates for the layer that objective=mtp adds; leave scale out",
        )
        if c.parallel.mesh != "auto":
            self._check_widths()

    def _check_widths(self) -> None:
        """Raises UsageError unless mp divides the widths of a dense layer and its input."""
        model, sizes = self.config.model, parse_mesh(self.config.parallel.mesh)
        fitting = sizes._replace(mp=math.gcd(model.d_model, model.ff_size, sizes.mp))
        for name, size in {"d_model": model.d_model, "feed-forward width": model.ff_size}.items():
            require(
                size % sizes.mp == 0,
                f"objective=mtp adds a layer whose {name}={size} does not divide over mp={sizes.mp} "
                f"(mesh={self.config.parallel.mesh}); try mesh={fitting}",
            )

    def as_language_model(self) -> "Config":
        return self.config.replace(objective="lm")
