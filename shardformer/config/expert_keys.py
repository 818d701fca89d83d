"""Keys of mixtures of experts: the feed-forward of a layer as many small ones, of which each token uses a few."""

import dataclasses
import itertools
from typing import Literal

from shardformer.config.keys import KeyGroup, key, require

MAX_EXPERTS = 100_000  # each may add a tile of padding to the rows of a product, which int32 counts


@dataclasses.dataclass(frozen=True)
class ExpertKeys(KeyGroup):
    """Experts"""

    experts: int = key(
        0, "experts in each layer's feed-forward; 0: one dense feed-forward", least=0, below=MAX_EXPERTS + 1, fixed=True
    )
    dense_first: int = key(
        0,
        "first layers with a dense feed-forward of width d_ff instead of experts, as DeepSeek; expert_pattern starts "
        "after them",
        least=0,
        fixed=True,
        needs="experts",
    )
    expert_pattern: str = key(
        "",
        "kinds of the layers, repeated; e: experts, d: dense feed-forward of width d_ff, such as de for experts in "
        "every other layer; empty: all have experts",
        fixed=True,
        needs="experts",
    )
    experts_per_token: int = key(2, "experts that each token uses", least=1, fixed=True, needs="experts")
    expert_width: int | None = key(
        None, "feed-forward width of one expert; auto: d_ff", least=1, fixed=True, needs="experts"
    )
    shared_width: int = key(
        0, "feed-forward width of the shared expert, which every token uses; 0: none", least=0, fixed=True,
        needs="experts",
    )  # fmt: skip
    shared_gate: bool = key(
        False, "multiply the shared expert by a sigmoid of each token, as Qwen2-MoE", fixed=True, needs="shared_width"
    )
    router: Literal["softmax", "sigmoid"] = key(
        "softmax", "scores of the experts, computed in float32 before the top-k", fixed=True, needs="experts"
    )
    router_norm: bool = key(
        True,
        "divide a token's scores by their sum; with router=softmax: a softmax over only the chosen experts",
        fixed=True,
        needs="experts",
    )
    balance_loss: float = key(
        0.0,
        "coefficient of the load balancing loss of Switch and GShard, over the global batch, added for each layer; "
        "with accum above 1 the experts of all microbatches are counted by one more forward pass",
        least=0,
        needs="experts",
    )
    router_z_loss: float = key(
        0.0, "coefficient of the squared log-partition of the router, added for each layer", least=0, needs="experts"
    )
    balance_rate: float = key(
        0.0,
        "change per step of a bias that only the choice of experts sees, towards equal load, as DeepSeek-V3; 0: none; "
        "with lora_rank, the biases of the base are frozen",
        least=0,
        fixed=True,
        needs="experts",
    )
    expert_axes: Literal["auto", "mp", "dp"] = key(
        "auto",
        "mesh axes that split the experts: mp, or dp (and mp), which sends tokens instead of matrices; auto: by bytes",
        needs="experts",
    )

    def list_sparse(self, layers: int) -> tuple[bool, ...]:
        """Returns, for each layer of a model, whether it has experts."""
        kinds = itertools.cycle(self.expert_pattern or "e")
        after = tuple(kind == "e" for kind in itertools.islice(kinds, max(layers - self.dense_first, 0)))
        return (False,) * min(self.dense_first, layers) + after

    def check(self) -> None:
        require(
            not self.experts or self.experts_per_token <= self.experts,
            f"experts_per_token={self.experts_per_token} must be at most experts={self.experts}; "
            f"try experts_per_token={self.experts}",
        )
        require(
            set(self.expert_pattern) <= {"e", "d"},
            "expert_pattern takes the letters e (experts) and d (dense), such as de; got "
            f"expert_pattern={self.expert_pattern:.40}",
        )
