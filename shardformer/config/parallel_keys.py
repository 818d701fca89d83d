"""Keys of the computation: the mesh, splits, number types, kernels and recomputation."""

import dataclasses
import functools
import math
from typing import Literal

from shardformer.config.keys import KeyGroup, UsedIf, key
from shardformer.config.names import CP, DP, PP
from shardformer.config.parsing import parse_mesh

WITH_STAGES = UsedIf(
    lambda keys: keys.mesh == "auto" or keys.pp > 1,
    "without pipeline stages; give a mesh that has them, such as mesh=2x1x2",
)
WITH_CONTEXT = UsedIf(
    lambda keys: keys.mesh != "auto" and keys.cp > 1,
    "unless the mesh splits the context; give a mesh that does, such as mesh=dp1.cp2.mp1",
)
WITH_SCATTERS = UsedIf(
    lambda keys: keys.zero == 3 and (keys.mesh == "auto" or keys.cp == 1), "without zero=3, or with cp > 1"
)


@dataclasses.dataclass(frozen=True)
class ParallelKeys(KeyGroup):
    """Computation (results agree to rounding)"""

    mesh: str = key(
        "auto",
        "devices as DPxMP (data parallel x model parallel), or DPxMPxPP with pipeline stages, through which the accum "
        "microbatches flow; by name, such as dp2.cp2.mp2, also with cp, over which the tokens of each row are split; "
        "auto: least mp that fits in memory; on a CPU mp alone where it divides the model and a step has few tokens",
    )
    zero: Literal[0, 1, 3] = key(
        0,
        "ZeRO; 1: parameters, gradients and optimizer split over dp, gathered once a step; 3: gathered layer by layer",
    )
    pipeline_rounds: int = key(
        1,
        "passes of a microbatch through each pipeline stage; more shrink the bubble and send more",
        least=1,
        used_if=WITH_STAGES,
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "number type of activations and matrix products; parameters (see param_dtype), softmax, norms, losses and "
        "sums of gradients stay float32",
    )
    grad_dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "number type in which zero=3 sends gradients; bfloat16 halves the bytes and rounds what is sent",
        used_if=WITH_SCATTERS,
    )
    sequence_parallel: bool = key(
        False, "split activations between the blocks over mp by tokens: less memory, for some more on the wire"
    )
    attention: Literal["auto", "plain", "blocks", "fused"] = key(
        "auto",
        "plain: all pairs of tokens at once; blocks: linear memory; fused: the kernel of a TPU or GPU; "
        "auto: fused where there is one, else blocks from 1,024 tokens",
    )
    context_parallel: Literal["auto", "ring", "gather"] = key(
        "auto",
        "how attention reaches the tokens of other cp shards; ring: keys and values travel while a part is computed; "
        "gather: every shard gathers them; auto: gather if that takes no more memory than the queries and, by the "
        "rates of the chip, no more time; `show` prints the choice",
        used_if=WITH_CONTEXT,
    )
    loss_chunk: int | None = key(
        None,
        "tokens per chunk when computing logits; auto: all, or as many as fit in 64 MiB on a CPU, 512 MiB elsewhere",
        least=1,
    )
    scan: bool | None = key(
        None,
        "true: the layers are one lax.scan, which compiles fast; false: they are unrolled, which may run faster; auto: "
        "true, except on GPUs, which copy each layer's arrays from and to those of a scan",
    )
    remat: Literal["none", "attention", "dots", "full"] = key(
        "none", "what the backward pass recomputes; attention: its weights; dots: all but matrix products"
    )

    @functools.cached_property
    def dp(self) -> int:
        return self.mesh_shape[0]

    @functools.cached_property
    def mp(self) -> int:
        return self.mesh_shape[1]

    @functools.cached_property
    def pp(self) -> int:
        return 1 if self.mesh == "auto" else parse_mesh(self.mesh).pp

    @functools.cached_property
    def cp(self) -> int:
        return 1 if self.mesh == "auto" else parse_mesh(self.mesh).cp

    @functools.cached_property
    def replicas(self) -> int:
        """Devices with the same parameters, over which ZeRO splits them: dp x cp."""
        return self.dp * self.cp

    @functools.cached_property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the tokens of a batch are split: its rows over dp and pp, each row over cp."""
        return (DP, *((PP,) if self.pp > 1 else ()), *((CP,) if self.cp > 1 else ()))

    @functools.cached_property
    def mesh_shape(self) -> tuple[int, ...]:
        """(dp, mp), or (dp, mp, pp) with two or more pipeline stages, or (dp, mp, pp, cp) with a split context."""
        if self.mesh == "auto":
            raise ValueError("mesh=auto has no shape yet; call mesh.choose_mesh(config) first")
        return parse_mesh(self.mesh)[: 4 if self.cp > 1 else 3 if self.pp > 1 else 2]

    @functools.cached_property
    def mesh_axes(self) -> str:
        """The meaning of the mesh's numbers, for tables and messages."""
        if self.cp > 1:
            return "dp x cp x mp x pp" if self.pp > 1 else "dp x cp x mp"
        return "dp x mp x pp" if self.pp > 1 else "dp x mp"

    @functools.cached_property
    def devices(self) -> int:
        return math.prod(self.mesh_shape)

    @property
    def is_complete(self) -> bool:
        return self.mesh != "auto"

    def check(self) -> None:
        if self.mesh != "auto":
            parse_mesh(self.mesh)
