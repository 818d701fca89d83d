"""Mixtures of experts: their keys, and `Mixture`, which answers what the rest of the program asks about them.

The feed-forward of a layer is many small ones, of which each token uses a few. Nothing here imports JAX.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from shardformer.config.keys import KeyGroup, UsedIf, key, largest_divisor, require
from shardformer.config.names import EXPERT_MATRICES, MATRICES, SHARED_MATRICES
from shardformer.errors import UsageError
from shardformer.tables import format_count

if TYPE_CHECKING:
    from shardformer.config.config import Config

OF_DENSE_LAYERS, OF_EXPERT_LAYERS = ("up", "gate", "down"), ("expert", "shared", "router")  # first words of names
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
    expert_bias: bool = key(
        False, "biases of the router and of each expert's products, as gpt-oss", fixed=True, needs="experts"
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
    router_scale: float = key(
        1.0, "factor on the gates of a token's experts, as DeepSeek-V3", fixed=True, needs="experts"
    )
    gate_inputs: bool = key(
        False, "multiply the inputs of a token's experts by their gates, not their outputs, as Llama 4", fixed=True,
        needs="experts",
    )  # fmt: skip
    expert_groups: int = key(
        1,
        "equal groups of experts; those of a token are in groups_per_token of them. A group ranks by its best expert, "
        "with router=sigmoid by the sum of its best two, as DeepSeek",
        least=1,
        fixed=True,
        needs="experts",
    )
    groups_per_token: int = key(
        1, "groups that a token's experts are in", least=1, fixed=True,
        used_if=UsedIf(lambda experts: experts.expert_groups > 1, "without expert_groups; give expert_groups as well"),
    )  # fmt: skip
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

    def check(self) -> None:
        require(self.router_scale > 0, f"router_scale must be above 0, got {self.router_scale}")
        require(
            not self.experts or self.experts_per_token <= self.experts,
            f"experts_per_token={self.experts_per_token} must be at most experts={self.experts}; "
            f"try experts_per_token={self.experts}",
        )
        if self.experts and self.expert_groups > 1:
            self._check_groups()
        require(
            set(self.expert_pattern) <= {"e", "d"},
            "expert_pattern takes the letters e (experts) and d (dense), such as de; got "
            f"expert_pattern={self.expert_pattern:.40}",
        )

    def _check_groups(self) -> None:
        require(
            self.experts % self.expert_groups == 0,
            f"experts={self.experts} does not divide into expert_groups={self.expert_groups}; try "
            f"expert_groups={largest_divisor(self.experts, self.expert_groups)}",
        )
        in_group = self.experts // self.expert_groups
        require(
            self.router == "softmax" or in_group > 1,
            f"router=sigmoid ranks a group by its best two experts, and expert_groups={self.expert_groups} have one "
            "each; give expert_groups=1",
        )
        require(
            self.groups_per_token <= self.expert_groups and self.experts_per_token <= self.groups_per_token * in_group,
            f"experts_per_token={self.experts_per_token} must be in groups_per_token={self.groups_per_token} of "
            f"expert_groups={self.expert_groups} with {in_group} each; try groups_per_token="
            f"{min(-(-self.experts_per_token // in_group), self.expert_groups)}",
        )


class Mixture:
    """The mixture of experts of a configuration, `config.mixture`. Without experts, all layers are dense."""

    def __init__(self, config: "Config"):
        self.config, self.keys = config, config.experts
        self.expert_size = self.keys.expert_width or config.model.ff_size  # feed-forward width of one expert
        self.moves_router_bias = bool(self.keys.balance_rate) and not config.lora.lora_rank  # else those are frozen

    @functools.cached_property
    def splits_experts(self) -> bool:
        """True if each shard of the model has some of the experts; else it has a part of each expert's width."""
        return self.keys.experts % self.config.parallel.mp == 0

    @functools.cached_property
    def sparse_layers(self) -> tuple[bool, ...]:
        """True for each layer that has experts instead of a dense feed-forward."""
        layers, first = self.config.model.layers, self.keys.dense_first
        kinds = itertools.cycle(self.keys.expert_pattern or "e")
        after = tuple(kind == "e" for kind in itertools.islice(kinds, max(layers - first, 0)))
        return (False,) * min(first, layers) + after

    @functools.cached_property
    def mixes_layers(self) -> bool:
        """True if some layers have experts and others a dense feed-forward."""
        return bool(self.keys.experts) and not all(self.sparse_layers)

    @property
    def has_dense_layers(self) -> bool:
        """True if some layers have a dense feed-forward."""
        return not self.keys.experts or self.mixes_layers

    def layers_of(self, name: str) -> Sequence[int]:
        """Returns the numbers of the layers that have a parameter of this name, such as `expert_up`.

        Their arrays are stacked on its leading axis.
        """
        layers, first_word = range(self.config.model.layers), name.rpartition("/")[2].partition("_")[0]
        if not self.mixes_layers or first_word not in (*OF_DENSE_LAYERS, *OF_EXPERT_LAYERS):
            return layers
        has_experts = first_word in OF_EXPERT_LAYERS
        return [i for i in layers if self.sparse_layers[i] == has_experts]

    def list_matrices(self) -> list[str]:
        """Returns the matrices of the layers' feed-forwards."""
        names = list(MATRICES[MATRICES.index("up") :]) if self.has_dense_layers else []
        if self.keys.experts:
            names += [*EXPERT_MATRICES, *(SHARED_MATRICES if self.keys.shared_width else ())]
        return [name for name in names if self.config.model.gated or not name.endswith("gate")]

    def list_widths(self) -> dict[str, int]:
        """Returns the widths of feed-forwards that mp splits, by what messages call them."""
        widths = {"feed-forward width": self.config.model.ff_size} if self.has_dense_layers else {}
        if self.keys.experts and not self.splits_experts:
            widths["the width of an expert"] = self.expert_size
        return widths | ({"shared_width": self.keys.shared_width} if self.keys.shared_width else {})

    @property
    def split_inputs(self) -> dict[str, int]:
        """The inputs of the feed-forwards' matrices whose rows mp may split."""
        widths = self.config.model.ff_size, self.keys.shared_width, self.expert_size
        return dict(zip(("down", "shared_down", "expert_down"), widths, strict=True))

    def local_widths(self, mp: int) -> dict[str, int]:
        """Returns the widths of the feed-forwards on a device, by the keys that give them."""
        widths = {}
        if self.keys.experts:
            widths["expert_width"] = self.expert_size // (mp if self.keys.experts % mp else 1)
        if self.has_dense_layers:
            widths["d_ff"] = self.config.model.ff_size // mp
        return widths | ({"shared_width": self.keys.shared_width // mp} if self.keys.shared_width else {})

    def check(self) -> None:
        """Raises UsageError for keys that experts cannot have."""
        if not self.keys.experts:
            return
        c = self.config
        require(
            any(self.sparse_layers),
            f"dense_first={self.keys.dense_first} and expert_pattern={self.keys.expert_pattern:.40} leave none of "
            f"layers={c.model.layers} with experts; give experts=0, or a smaller dense_first",
        )
        require(
            "up" not in c.model.biased,
            f"bias={c.model.bias} has biases in a dense feed-forward, and not in experts; give bias=none or bias=norm, "
            "and expert_bias=true for biases of the experts",
        )
        require(
            not c.optimizer.searches_rate,
            "optimizer=lbfgs searches along a smooth loss, and experts make it jump where routes change; give another "
            "one",
        )
        require(
            not c.training.grad_metrics,
            "grad_metrics=true needs each example's gradient by itself, and that of an expert mixes the tokens of all "
            "dp and the balance of the batch; give grad_metrics=false",
        )

    def check_given(self, given: dict[str, object]) -> None:
        """Raises UsageError for a key that a user gave and that has no effect."""
        if given.get("balance_rate") and self.config.lora.lora_rank and not self.config.training.base:
            raise UsageError("balance_rate does nothing with lora_rank, which freezes the biases; give balance_rate=0")

    def check_axes(self) -> None:
        """Raises UsageError if the mesh axes of experts do not divide them."""
        p = self.config.parallel
        over_dp = p.dp * p.mp if self.keys.expert_axes == "dp" and p.dp > 1 else 1
        require(
            self.keys.experts % over_dp == 0,
            f"expert_axes=dp splits experts={self.keys.experts} over dp * mp = {over_dp} (mesh={p.mesh}), which "
            "does not divide them; give expert_axes=mp",
        )

    def check_stages(self, size: int, without: object) -> None:
        """Raises UsageError if stages of `size` layers differ; `without` is the mesh without stages."""
        repeated = self.sparse_layers[:size] * (len(self.sparse_layers) // size)
        require(
            not self.mixes_layers or self.sparse_layers == repeated,
            f"all stages run one program, and stages of {format_count(size, 'layer')} "
            f"(mesh={self.config.parallel.mesh}) have experts in different layers with "
            f"dense_first={self.keys.dense_first} expert_pattern={self.keys.expert_pattern:.40}; give mesh={without}, "
            "or a pattern that repeats in every stage",
        )
