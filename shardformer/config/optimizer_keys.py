"""Keys of the optimizer: its kind, the rates, the moments and the stored number types."""

import dataclasses
from typing import Literal

from shardformer.config.keys import KeyGroup, UsedIf, key, require
from shardformer.config.parsing import parse_lr_rules
from shardformer.config.training_keys import check_decay

MAX_BETA = 0.999999  # a moment in float32 stops following the gradients before its decay is 1
WITH_RATE = UsedIf(lambda keys: keys.name != "lbfgs", "with optimizer=lbfgs, whose line search finds the rate")
WITH_FALLING_RATE = UsedIf(
    lambda keys: keys.name != "lbfgs" and keys.schedule != "constant",
    "with optimizer=lbfgs or schedule=constant, whose rate does not fall",
)


@dataclasses.dataclass(frozen=True)
class OptimizerKeys(KeyGroup):
    """Optimizer"""

    name: Literal["adamw", "lbfgs", "muon"] = key(
        "adamw", "muon: for the layers' matrices; lbfgs: line search, ignores lr", fixed=True, flat="optimizer"
    )
    lr: float = key(1e-3, "peak learning rate", least=0, used_if=WITH_RATE)
    schedule: Literal["cosine", "wsd", "linear", "constant"] = key(
        "cosine", "learning rate after the warm-up; wsd: constant, then a linear decay", used_if=WITH_RATE
    )
    lr_min: float = key(1e-4, "final learning rate of the decay; never above lr", least=0, used_if=WITH_FALLING_RATE)
    warmup: int = key(100, "linear warm-up steps; fewer than decay_steps", least=0, used_if=WITH_RATE)
    decay_steps: int | None = key(
        None, "step at which the rate reaches lr_min; auto: the last step", least=1, used_if=WITH_FALLING_RATE
    )
    decay: int | None = key(
        None,
        "steps of the decay of schedule=wsd, up to decay_steps, at most those after the warm-up; auto: a tenth of it",
        least=1,
        used_if=UsedIf(lambda keys: keys.schedule == "wsd", "without schedule=wsd"),
    )
    lr_rules: str = key(
        "",
        "rates by whole parts of names: '*bias=10x,embed=0.1x,layers/up=frozen'; first match wins",
        fixed=True,
    )
    beta1: float = key(0.9, "decay of Adam's first moment", used_if=WITH_RATE)
    beta2: float = key(0.99, "decay of Adam's second moment", used_if=WITH_RATE)
    weight_decay: float = key(0.1, "weight decay of matrices; norms, biases and positions have none", least=0)
    clip: float = key(1.0, "limit of the global gradient norm; 0: no clipping", least=0)
    param_dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "type in which the layers' matrices are stored; bfloat16 keeps float32 masters for the optimizer",
        fixed=True,
    )
    moment_dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "type of the optimizer's moments; bfloat16 takes half the memory and rounds at random",
        fixed=True,
    )
    offload: Literal["none", "optimizer"] = key(
        "none",
        "optimizer: keep its moments, and the masters of param_dtype=bfloat16, in the host's memory between steps; "
        "the update copies one layer after the other to the device and back",
    )

    def check(self) -> None:
        check_decay("beta1", self.beta1, MAX_BETA)
        check_decay("beta2", self.beta2, MAX_BETA)
        rules = parse_lr_rules(self.lr_rules)
        require(
            self.offload == "none" or (self.name == "adamw" and self.moment_dtype == "float32"),
            "offload=optimizer updates one layer after the other: give optimizer=adamw and moment_dtype=float32; got "
            f"optimizer={self.name} moment_dtype={self.moment_dtype}",
        )
        if self.name != "lbfgs":
            return
        rates = [str(rule) for rule in rules if rule.factor]
        require(
            not rates,
            "lr_rules with optimizer=lbfgs can only freeze, as one line search finds one rate for all; got "
            + ",".join(rates),
        )
        require(
            self.moment_dtype == "float32",
            f"optimizer=lbfgs needs moment_dtype=float32; got moment_dtype={self.moment_dtype}",
        )
