"""The Layout: the choices that a step follows, resolved once from the configuration and the hardware."""

import dataclasses
from typing import TYPE_CHECKING, Any

from shardformer.config import Config
from shardformer.devices.chips import CPU, Hardware
from shardformer.kernels.attention import Attention, Plain
from shardformer.kernels.remat import Remat
from shardformer.layout.attention_limits import Rows
from shardformer.layout.choose_attention import choose_attention, without_kernel
from shardformer.layout.choose_layers import Loop, choose_loop, choose_loss_chunk, choose_pipeline, choose_remat
from shardformer.layout.choose_replicas import choose_replicas
from shardformer.layout.float_weights import FLOAT, FloatWeights
from shardformer.parallel.replicas import Replicated

if TYPE_CHECKING:
    from shardformer.parallel.pipeline import Pipeline

PLAIN, SCAN, KEEP_ALL, REPLICATED, NO_ROWS = Plain(), Loop(scan=True), Remat(), Replicated(), Rows(0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The choices of one configuration on one type of device. `reasons` explains each choice in one sentence."""

    config: Config
    hardware: Hardware = CPU
    torus: tuple[int, ...] = ()  # the torus dimensions that dp follows, the slowest first
    attention: Attention = PLAIN
    loop: Loop = SCAN
    remat: Remat = KEEP_ALL
    loss_chunk: int | None = None  # tokens whose logits exist together; None: all
    pipeline: "Pipeline | None" = None
    replicas: Replicated = REPLICATED
    weights: FloatWeights = FLOAT  # how the matrices are stored
    experts: Any = None  # the grouped product of experts; None without experts
    expert_axes: tuple[str, ...] = ()  # the mesh axes over which experts are split
    reasons: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)  # by field
    rows: Rows = NO_ROWS  # that the attention is for

    def for_rows(self, rows: Rows) -> "Layout":
        """Returns the layout for rows of another length, or with other dropout or documents than in training."""
        return self if rows == self.rows else self._choose_for(rows)

    def _choose_for(self, rows: Rows) -> "Layout":
        return self._attend_by(*choose_attention(self.config, self.hardware, rows), rows)

    def without_kernel(self) -> "Layout":
        """Returns the layout with blocks instead of a kernel, which cannot be traced without its device."""
        attention = without_kernel(self.attention, self.config, self.rows)
        return self if attention is self.attention else self._attend_by(attention, "for a trace", self.rows)

    def _attend_by(self, attention: Attention, why_attention: str, rows: Rows) -> "Layout":
        loop, why_loop = choose_loop(self.config, self.hardware, attention)
        remat, why_remat = choose_remat(self.config, attention)
        reasons = self.reasons | {"attention": why_attention, "loop": why_loop, "remat": why_remat}
        return dataclasses.replace(self, attention=attention, loop=loop, remat=remat, rows=rows, reasons=reasons)


def resolve(config: Config, hardware: Hardware = CPU, torus: tuple[int, ...] = ()) -> Layout:
    """Returns the layout of a configuration whose mesh is known. It touches no device."""
    chunk, why_chunk = choose_loss_chunk(config, hardware)
    pipeline, why_pipeline = choose_pipeline(config)
    replicas, why_replicas = choose_replicas(config, hardware, torus)
    reasons = {"loss_chunk": why_chunk, "pipeline": why_pipeline, "replicas": why_replicas}
    layout = Layout(config, hardware, torus, loss_chunk=chunk, pipeline=pipeline, replicas=replicas, reasons=reasons)
    if config.stored.quantized:
        from shardformer.quantized import quantized_weights  # not imported for float weights

        layout = quantized_weights.quantize_layout(layout)
    if config.experts.experts:
        from shardformer.experts import expert_layout  # not imported without experts

        layout = expert_layout.add_experts(layout)
    return layout.for_rows(Rows.of_training(config))
