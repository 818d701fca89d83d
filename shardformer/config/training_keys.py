"""Keys of the training: batches, accumulation, averages, the start of the weights, and the guard against bad steps."""

import dataclasses
from typing import Literal

from shardformer.config.keys import KeyGroup, key, next_multiple, require
from shardformer.config.parsing import split_checkpoint

MAX_EMA = 0.9999  # an average in float32 stops following its input before its decay is 1


@dataclasses.dataclass(frozen=True)
class TrainingKeys(KeyGroup):
    """Training"""

    batch: int = key(12, "sequences per step, over the whole mesh", least=1, fixed=True)
    steps: int = key(2000, "optimizer steps of the whole run", least=1)
    epochs: float = key(0.0, "times that the run reads its training data, in place of steps; 0: by steps", least=0)
    seed: int = key(
        0, "seed of the initial parameters, the order of the batches and the dropout masks", least=0, fixed=True
    )
    dropout: float = key(0.0, "dropout probability on the embedding, attention weights and residual branches")
    z_loss: float = key(0.0, "weight of the squared log-partition added to the loss per token; GPT-J: 1e-4", least=0)
    accum: int = key(
        1, "microbatches per step; activations take 1/accum of the memory; auto: as few as fit", least=0, zero="auto"
    )
    accum_mode: Literal["scan", "multisteps", "manual"] = key(
        "scan", "scan: one compiled step; multisteps: optax.MultiSteps; manual: two functions", fixed=True
    )
    grad_metrics: bool = key(False, "at logged steps, write gradient norms per example and the gradient noise scale")
    ema: float = key(
        0.0, "decay of an exponential average of the weights, for eval and sample; 0: no average", fixed=True
    )
    base: str = key(
        "",
        "run folder whose best weights this run starts from, or one of its checkpoints, RUN/step_N, which this run "
        "continues, optimizer and data included; empty: from the seed",
        fixed=True,
    )

    @property
    def base_run(self) -> str:
        """The folder of the run that `base` names, itself or by a checkpoint."""
        return split_checkpoint(self.base)[0]

    @property
    def base_step(self) -> int:
        """The step of the checkpoint that `base` names; 0: it names a run."""
        return split_checkpoint(self.base)[1]

    def check(self) -> None:
        require(0 <= self.dropout < 1, f"dropout is a probability below 1, got {self.dropout}")
        check_decay("ema", self.ema, MAX_EMA)
        parts = max(self.accum, 1)
        require(
            self.batch % parts == 0,
            f"batch={self.batch} does not divide into accum={self.accum} microbatches; "
            f"try batch={next_multiple(self.batch, parts)}, or another accum",
        )
        require(
            not self.grad_metrics or self.batch > 1,
            f"grad_metrics=true compares examples and needs 2 or more in a batch, got batch={self.batch}",
        )


def check_decay(name: str, value: float, most: float) -> None:
    require(0 <= value < 1, f"{name} is the decay of an average, in [0, 1), got {value}")
    require(value <= most, f"{name}={value} is too close to 1 for float32; give at most {most}")


SKIP_LIMIT = 5  # left-out steps in a row after which the run goes back to a checkpoint
ROLLBACKS = 3  # times that a run goes back; the next time it ends


@dataclasses.dataclass(frozen=True)
class BadStepKeys(KeyGroup):
    """Bad steps"""

    skip_steps: float = key(
        0.0,
        "leave out steps whose loss or gradient norm is this many deviations above the median of the last 128; 0: none",
        least=0,
    )
