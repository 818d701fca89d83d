"""Keys of the optimizer: its kind, the rates, the moments and the stored number types."""

import dataclasses
from typing import Literal

from shardformer.config.keys import KeyGroup, UsedIf, key, require
from shardformer.config.parsing import parse_lr_rules
from shardformer.config.registries import OWN, asks_for, is_of_a_program, names_code
from shardformer.config.training_keys import check_decay

MAX_BETA = 0.999999  # a moment in float32 stops following the gradients before its decay is 1
OPTIMIZERS, SCHEDULES = "optim/optimizers.py", "optim/schedule.py"
WITH_RATE = UsedIf(lambda keys: not keys.searches_rate, "with optimizer=lbfgs, whose line search finds the rate")
MUONS = ("muon", "normuon")  # which update full matrices
WITH_MOMENTUM = UsedIf(lambda keys: keys.name in MUONS, "without optimizer=muon or normuon")
WITH_FALLING_RATE = UsedIf(
    lambda keys: not keys.searches_rate and keys.falls,
    "with optimizer=lbfgs or schedule=constant, whose rate does not fall",
)


@dataclasses.dataclass(frozen=True)
class OptimizerKeys(KeyGroup):
    """Optimizer"""

    name: str = key(
        "adamw",
        "muon: for the layers' matrices; normuon: muon with equally large updates of outputs; lbfgs: line search, "
        "ignores lr; FILE.py:NAME: a function that returns an optax transformation, named at every start",
        fixed=True,
        flat="optimizer",
        registry=OPTIMIZERS,
        takes_code=True,
    )
    lr: float = key(1e-3, "peak learning rate", least=0, used_if=WITH_RATE)
    schedule: str = key(
        "cosine",
        "learning rate after the warm-up; wsd: constant, then a linear decay",
        used_if=WITH_RATE,
        registry=SCHEDULES,
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
        used_if=UsedIf(lambda keys: keys.decays_late, "without schedule=wsd"),
    )
    lr_rules: str = key(
        "", "rates by whole parts of names: '*bias=10x,embed=0.1x,layers/up=frozen'; first match wins", fixed=True
    )
    beta1: float = key(0.9, "decay of Adam's first moment", used_if=WITH_RATE)
    beta2: float = key(0.99, "decay of Adam's second moment", used_if=WITH_RATE)
    momentum: float = key(0.95, "decay of muon's momentum; 0.9 is better for a thousand steps", used_if=WITH_MOMENTUM)
    weight_decay: float = key(0.1, "weight decay of matrices; norms, biases and positions have none", least=0)
    clip: float = key(1.0, "limit of the global gradient norm; 0: no clipping", least=0)
    param_dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "type in which the layers' matrices are stored; bfloat16 keeps float32 masters for the optimizer",
        fixed=True,
    )
    moment_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "type of the optimizer's moments; bfloat16 takes half the memory and rounds at random", fixed=True
    )
    offload: Literal["none", "optimizer"] = key(
        "none",
        "optimizer: keep its moments, and the masters of param_dtype=bfloat16, in the host's memory between steps; "
        "the update copies one layer after the other to the device and back",
    )

    @property
    def searches_rate(self) -> bool:
        """True if a line search finds the rate of each step."""
        return self.name == "lbfgs"

    @property
    def falls(self) -> bool:
        """True if the rate falls to lr_min."""
        return asks_for(SCHEDULES, self.schedule, "lowest")

    @property
    def decays_late(self) -> bool:
        """True if the rate falls in the last `decay` steps only."""
        return asks_for(SCHEDULES, self.schedule, "decay")

    @property
    def is_code(self) -> bool:
        """True if the optimizer is a function of the user, of a file, also one of an earlier start, or registered."""
        return self.name == OWN or names_code(self.name) or is_of_a_program(OPTIMIZERS, self.name)

    def check(self) -> None:
        check_decay("beta1", self.beta1, MAX_BETA)
        check_decay("beta2", self.beta2, MAX_BETA)
        check_decay("momentum", self.momentum, MAX_BETA)
        rules = parse_lr_rules(self.lr_rules)
        require(
            self.offload == "none" or (self.name == "adamw" and self.moment_dtype == "float32"),
            "offload=optimizer updates one layer after the other, but muon exchanges the matrices of all layers at "
            "once, lbfgs has products over all parameters, and bfloat16 moments are rounded by bits for all layers: "
            f"give optimizer=adamw and moment_dtype=float32; got optimizer={self.name} "
            f"moment_dtype={self.moment_dtype}",
        )
        if not (self.searches_rate or self.is_code):
            return
        reason = "one line search finds one rate for all" if self.searches_rate else "it applies the rate itself"
        rates = [str(rule) for rule in rules if rule.factor]
        require(not rates, f"lr_rules with optimizer={self.name} can only freeze, as {reason}; got {','.join(rates)}")
        require(
            self.moment_dtype == "float32",
            f"optimizer={self.name} needs moment_dtype=float32; got moment_dtype={self.moment_dtype}",
        )
