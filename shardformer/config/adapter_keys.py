"""Keys of LoRA adapters, and the rank and the scale that they give each matrix."""

import dataclasses
import math

from shardformer.config.keys import KeyGroup, key, require


@dataclasses.dataclass(frozen=True)
class AdapterKeys(KeyGroup):
    """Adapters"""

    lora_rank: int = key(
        0, "rank of LoRA adapters, trained while the weights are frozen; 0: train the weights", least=0, fixed=True
    )
    lora_targets: str = key(
        "q,v",
        "matrices that get adapters: any of q, k, v, o, up, gate (swiglu and geglu), down",
        fixed=True,
        needs="lora_rank",
    )
    lora_alpha: float = key(
        16.0, "scale of the adapters is lora_alpha / lora_rank", least=0, fixed=True, needs="lora_rank"
    )
    lora_rank_pattern: str = key(
        "", "ranks of single matrices, such as q=4,down=16; the others have lora_rank", fixed=True, needs="lora_rank"
    )
    lora_alpha_pattern: str = key(
        "", "lora_alpha of single matrices, such as q=32; the others have lora_alpha", fixed=True, needs="lora_rank"
    )
    lora_dropout: float = key(0.0, "dropout probability on the inputs of the adapters", needs="lora_rank")
    rslora: bool = key(
        False, "scale the adapters by lora_alpha / sqrt(lora_rank), for large ranks", fixed=True, needs="lora_rank"
    )

    @property
    def lora_names(self) -> tuple[str, ...]:
        return tuple(self.lora_targets.split(","))

    def adapter_rank(self, matrix: str) -> int:
        return int(parse_pattern(self.lora_rank_pattern).get(matrix, self.lora_rank))

    def adapter_alpha(self, matrix: str) -> float:
        return parse_pattern(self.lora_alpha_pattern).get(matrix, self.lora_alpha)

    def adapter_scale(self, matrix: str) -> float:
        return scale_of(self.adapter_rank(matrix), self.adapter_alpha(matrix), self.rslora)

    def check(self) -> None:
        require(0 <= self.lora_dropout < 1, f"lora_dropout is a probability below 1, got {self.lora_dropout}")
        if not self.lora_rank:
            return
        require(self.lora_alpha > 0, "lora_alpha=0 would switch the adapters off; try lora_alpha=16")
        for name in ("lora_rank_pattern", "lora_alpha_pattern"):
            text = getattr(self, name)
            result = parse_pattern(text)
            whole = name == "lora_alpha_pattern" or all(value.is_integer() for value in result.values())
            require(
                whole and all(0 < value < 2**31 for value in result.values()),
                f"{name} takes MATRIX=NUMBER with {'whole ' if 'rank' in name else ''}numbers above 0, separated by "
                f"commas, such as q=4,down=16; got {text!r:.80}",
            )
            unknown = [matrix for matrix in result if matrix not in self.lora_names]
            require(
                not unknown,
                f"{name} names {', '.join(unknown)[:80]}, which has no adapter; lora_targets={self.lora_targets}",
            )


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """Returns the factor of the product of an adapter's two factors."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def parse_pattern(text: str) -> dict[str, float]:
    """Returns the values of 'q=4,down=16' by matrix; NaN stands for a word that is not a number."""
    result = {}
    for word in filter(None, text.split(",")):
        matrix, _, number = word.partition("=")
        try:
            result[matrix.strip()] = float(number)
        except ValueError:
            result[matrix.strip()] = math.nan
    return result


def format_pattern(values: dict[str, float]) -> str:
    """Returns the text that `parse_pattern` reads; digits are kept."""
    return ",".join(f"{matrix}={repr(float(number)).removesuffix('.0')}" for matrix, number in values.items())
