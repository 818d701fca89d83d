"""Keys of LoRA adapters, the rank, scale and split that they give each factor, and which parameters are trained."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

from shardformer.config.keys import KeyGroup, key, require
from shardformer.config.names import EXPERT_MATRICES, LAYERS, LORA_IN, LORA_OUT
from shardformer.config.optimizer_keys import MUONS
from shardformer.config.parsing import shorten
from shardformer.errors import UsageError

if TYPE_CHECKING:
    from shardformer.config.config import Config


class Adapter(NamedTuple):
    """The rank and the alpha of a matrix's adapter; its scale is alpha / rank, or alpha / sqrt(rank) with rslora."""

    rank: int
    alpha: float


@dataclasses.dataclass(frozen=True)
class AdapterKeys(KeyGroup):
    """Adapters"""

    lora_rank: int = key(
        0, "rank of LoRA adapters, trained while the weights are frozen; 0: train the weights", least=0, fixed=True
    )
    lora_targets: str = key(
        "q,v",
        "matrices that get adapters: any of q, k, v, o, up, gate (swiglu and geglu), down; layers with experts have "
        "expert_up, expert_gate, expert_down, and shared_up, shared_gate, shared_down of a shared expert, instead of "
        "the last three; with another rank or alpha: MATRIX:RANK or MATRIX:RANK:ALPHA, such as q,v:4,down:16:32",
        fixed=True,
        needs="lora_rank",
    )
    lora_alpha: float = key(
        16.0, "scale of the adapters is lora_alpha / lora_rank", least=0, fixed=True, needs="lora_rank"
    )
    lora_dropout: float = key(0.0, "dropout probability on the inputs of the adapters", needs="lora_rank")
    rslora: bool = key(
        False, "scale the adapters by lora_alpha / sqrt(lora_rank), for large ranks", fixed=True, needs="lora_rank"
    )

    @functools.cached_property
    def adapters(self) -> dict[str, Adapter]:
        """The adapter of each matrix that has one."""
        return parse_targets(self.lora_targets, Adapter(self.lora_rank, self.lora_alpha)) if self.lora_rank else {}

    @property
    def lora_names(self) -> tuple[str, ...]:
        return tuple(self.adapters)

    def adapter_scale(self, matrix: str) -> float:
        return scale_of(*self.adapters[matrix], self.rslora)

    def check(self) -> None:
        require(0 <= self.lora_dropout < 1, f"lora_dropout is a probability below 1, got {self.lora_dropout}")
        require(
            self.lora_alpha > 0 or not self.lora_rank,
            "lora_alpha=0 would switch the adapters off; try lora_alpha=16",
        )

    def check_matrices(self, c: "Config") -> None:
        """Raises UsageError for matrices that a model does not have, and what adapters cannot be combined with."""
        if not self.lora_rank:
            return
        # With a latent, decoding multiplies k and v with queries and sums: it has no products for their adapters.
        matrices = [*("qo" if c.model.kv_latent else "qkvo"), *c.mixture.list_matrices()]
        unknown = [name for name in self.lora_names if name not in matrices]
        require(not unknown, f"lora_targets takes some of {','.join(matrices)}, got {shorten(self.lora_targets)}")
        of_experts = [name for name in self.lora_names if name in EXPERT_MATRICES]
        require(
            not (of_experts and self.lora_dropout),
            f"lora_dropout={self.lora_dropout} drops inputs of a token, and {','.join(of_experts)} of lora_targets "
            "have the inputs of each expert; give lora_dropout=0",
        )
        require(
            c.optimizer.name not in MUONS,
            f"optimizer={c.optimizer.name} updates full matrices, but lora_rank trains adapters; give optimizer=adamw",
        )


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of this name is a factor of an adapter."""
    return name.endswith((LORA_IN, LORA_OUT))


def split_factor(name: str, axes: tuple) -> tuple:
    """Returns the mesh axes of a factor's dimensions, from those of its matrix [L, ..., inputs, outputs].

    The factor without the dimension that is split is replicated.
    """
    if len(axes) < 3:
        return axes  # of a matrix that is replicated
    left = (*axes[:-1], None) if name.endswith(LORA_IN) else (*axes[:-2], None, axes[-1])
    return left if any(left[1:]) else tuple(filter(None, left[:1]))


def select_trainable(parameters: dict, config: "Config") -> dict:
    """Returns the trainable parameters: only the adapters if there are any, else all."""
    if not config.lora.lora_rank:
        return parameters
    return {LAYERS: {name: leaf for name, leaf in parameters[LAYERS].items() if is_adapter(name)}}


def replace_trainable(parameters: dict, trainable: dict) -> dict:
    """Returns all parameters, with new values for the trainable ones."""
    return {module: leaves | trainable.get(module, {}) for module, leaves in parameters.items()}


def remove_adapters(parameters: dict) -> dict:
    """Returns the parameters without adapters."""
    return {
        module: {name: leaf for name, leaf in leaves.items() if not is_adapter(name)}
        for module, leaves in parameters.items()
    }


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """Returns the factor of the product of an adapter's two factors."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def parse_targets(text: str, common: Adapter) -> dict[str, Adapter]:
    """Returns the adapters of 'q,v:4,down:16:32'; what a matrix does not name is as in `common`."""
    adapters: dict[str, Adapter] = {}
    for word in text.split(","):
        matrix, *values = word.split(":")
        rank, alpha = _parse_numbers(values, common)
        if not (0 < rank < 2**31 and 0 < alpha < 2**31 and rank == int(rank)):
            raise UsageError(
                "lora_targets takes MATRIX, MATRIX:RANK or MATRIX:RANK:ALPHA with numbers above 0, separated by "
                f"commas, such as q,v:4,down:16:32; got {shorten(word)}"
            )
        if matrix in adapters:
            raise UsageError(f"lora_targets takes each matrix once, got {shorten(text)}")
        adapters[matrix] = Adapter(int(rank), alpha)
    return adapters


def _parse_numbers(values: list[str], common: Adapter) -> tuple[float, float]:
    """Returns the rank and the alpha that at most two values give; NaN if they give none."""
    try:
        rank = float(values[0]) if values else common.rank
        alpha = float(values[1]) if len(values) > 1 else common.alpha
    except ValueError:
        return math.nan, math.nan
    return (rank, alpha) if len(values) <= 2 else (math.nan, math.nan)


def format_targets(adapters: dict[str, Adapter], common: Adapter) -> str:
    """Returns the text that `parse_targets` reads; digits are kept."""
    targets = []
    for matrix, (rank, alpha) in adapters.items():
        if alpha != common.alpha:
            targets.append(f"{matrix}:{rank}:{repr(float(alpha)).removesuffix('.0')}")
        else:
            targets.append(matrix if rank == common.rank else f"{matrix}:{rank}")
    return ",".join(targets)
