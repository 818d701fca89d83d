"""The choice of the attention method, with its reason: a device's kernel, blocks, or all pairs of tokens at once.

With context parallelism, also the choice between a ring and a gather: by the memory of keys and values, and by the time
that a layer waits. A ring hides each send behind the computation of its step, and pays for cp - 1 exchanges. A gather
hides nothing, and pays for one.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.kernels.attention import Attention, AttentionOptions, Plain
from shardformer.kernels.blockwise_attention import Blocks, block_size
from shardformer.kernels.fused_attention import Demands, Hardware, Kernel, reason_against
from shardformer.parallel.ring_attention import Gathered, Ring
from shardformer.tables import format_count

EXCHANGE = 5e-6  # latency in seconds of an exchange besides its bytes: an assumption, no device was measured


class Rows(NamedTuple):
    """The rows that attention is chosen for."""

    tokens: int  # of one shard
    dropout: bool = False
    documents: bool = False

    @classmethod
    def of_training(cls, config: Config) -> "Rows":
        return cls(
            config.model.seq // config.parallel.cp, bool(config.training.dropout), config.data.documents == "masked"
        )


class Choice(NamedTuple):
    """An attention method, and why."""

    attention: Attention
    reason: str


@dataclasses.dataclass(frozen=True)
class NoKernel(Attention):
    """attention=fused for devices without a kernel that computes it."""

    message: str = ""

    def attend(self, q_BThK: Array, k_BSgK: Array, v_BSgK: Array, options: AttentionOptions) -> Array:
        raise UsageError(self.message)


def choose_attention(config: Config, hardware: Hardware, rows: Rows) -> Choice:
    """Chooses the devices' kernel if it can do the job, else blocks from 1,024 tokens on (faster on a CPU)."""
    if config.parallel.cp > 1:
        return _choose_in_context(config, hardware, rows)
    reason = f"attention={config.parallel.attention}"
    if config.parallel.attention in ("auto", "fused"):
        reason = reason_against_kernel(config, hardware, rows)
        if not reason:
            return Choice(Kernel(hardware.platform), "the devices have a kernel")
        if config.parallel.attention == "fused":
            return Choice(NoKernel(f"attention=fused: {reason}; give attention=auto"), reason)
    if config.parallel.attention == "blocks" or (config.parallel.attention == "auto" and rows.tokens >= 1024):
        return Choice(Blocks(block_size(rows.tokens)), reason)
    return Choice(Plain(_choose_groups(config, hardware, rows.tokens)), reason)


def _choose_in_context(config: Config, hardware: Hardware, rows: Rows) -> Choice:
    """Chooses between a ring of kernels, a ring in blocks, and a gather."""
    reason = reason_against_ring(config, hardware, rows)
    if not reason:
        return Choice(Ring(block=0), "the kernel computes the steps of a ring")
    if config.parallel.attention == "fused":
        return Choice(NoKernel(f"attention=fused: {reason}; give attention=auto"), reason)
    method, why = choose_ring_or_gather(config, hardware)
    block = choose_block(config, rows.tokens)
    return Choice(Ring(block=block) if method == "ring" else Gathered(block=block), f"{why} (no kernel: {reason})")


def without_kernel(attention: Attention, config: Config, rows: Rows) -> Attention:
    """Returns attention in blocks, which keep as little as a kernel, and can be traced without its device."""
    if not attention.uses_kernel and not isinstance(attention, NoKernel):
        return attention
    in_blocks = config.replace(attention="blocks")
    if config.parallel.cp == 1:
        return Blocks(block_size(rows.tokens))
    if isinstance(attention, NoKernel):
        return choose_attention(in_blocks, Hardware("cpu"), rows).attention
    return Ring(block=choose_block(in_blocks, rows.tokens))


def _choose_groups(config: Config, hardware: Hardware, tokens: int) -> int:
    """Returns the groups of queries of plain attention.

    On a CPU, attention with its gradient needs 0.74 of the time in four groups at 256 tokens, 0.63 at 512, and gains
    less at 128. In bfloat16 it stays in one, so that the losses of earlier releases remain, bit for bit; with fewer
    key/value heads, because XLA would keep the weights twice.
    """
    serves = (
        hardware.platform == "cpu"
        and config.parallel.dtype == "float32"
        and config.model.key_value_heads == config.model.heads
    )
    return 4 if serves and tokens >= 256 else 1


def choose_block(config: Config, tokens: int) -> int:
    """Returns the tokens of a block of a shard that has `tokens` tokens: a chunk, or a divisor of it in long rows."""
    chunk = tokens // 2
    if config.parallel.attention == "plain" or (
        config.parallel.attention == "auto" and tokens * config.parallel.cp < 1024
    ):
        return chunk
    most = block_size(chunk)
    return next(size for size in range(most, 0, -1) if chunk % size == 0)


def reason_against_kernel(config: Config, hardware: Hardware, rows: Rows) -> str:
    """Returns why these devices have no kernel for the attention of this model, or ''."""
    demands = Demands(
        rows.tokens, config.model.head_size, config.parallel.dtype, rows.documents, config.model.attention_cap
    )
    if reason := reason_against(hardware, demands):
        return reason
    if rows.dropout:
        return "no kernel takes dropout"
    if config.model.biased_by_distance:
        return f"no kernel takes the bias of positions={config.model.positions}"
    if config.parallel.pp > 1 and config.stage_layers % config.model.window_period:
        pattern, size = config.model.window_pattern, format_count(config.stage_layers, "layer")
        stages = f"window_pattern={pattern} in stages of {size}"
        return f"no kernel takes {stages}, which must be a multiple of the pattern's {config.model.window_period}"
    return ""


def reason_against_ring(config: Config, hardware: Hardware, rows: Rows) -> str:
    """Returns why no kernel computes the steps of a ring for these rows, or ''."""
    if config.parallel.attention not in ("auto", "fused"):
        return f"attention={config.parallel.attention}"
    if config.parallel.context_parallel == "gather":
        return "a kernel computes the steps of a ring, got context_parallel=gather"
    if hardware.platform != "tpu":
        return "only a TPU's kernel returns the statistics that join steps"
    if config.model.window:
        return "a ring of kernels takes no window"
    return reason_against_kernel(config, hardware, rows._replace(tokens=rows.tokens // 2))


def choose_ring_or_gather(config: Config, hardware: Hardware) -> tuple[str, str]:
    """Chooses the gather if it needs no more memory than the queries and no more time than a ring, with the reason.

    Without the device's rates, the memory decides.
    """
    if config.parallel.context_parallel != "auto":
        return config.parallel.context_parallel, f"context_parallel={config.parallel.context_parallel}"
    share = 2 * config.parallel.cp * config.model.key_value_heads / config.model.heads
    memory = f"keys and values of complete rows take {share:.3g} times the memory of a shard's queries"
    if share > 1:
        return "ring", memory
    if not hardware.flops:
        return "gather", memory
    waits = {method: 1e6 * seconds for method, seconds in find_waits(config, hardware).items()}
    method = "gather" if waits["gather"] <= waits["ring"] else "ring"
    return method, f"a layer waits {waits['ring']:,.0f} us with a ring, {waits['gather']:,.0f} us with a gather"


def find_waits(config: Config, hardware: Hardware) -> dict[str, float]:
    """Returns the seconds that a layer's forward pass waits for keys and values, by method."""
    tokens = config.model.seq // config.parallel.cp
    rows = config.microbatch_rows
    pairs = rows * tokens * tokens / 2  # of tokens in a step: zig-zag order halves the work of every step
    computing = 4 * pairs * config.model.attention_size / config.parallel.mp / hardware.flops
    width = config.model.key_value_heads * config.model.head_size / config.parallel.mp
    sending = 2 * rows * tokens * width * (2 if config.parallel.dtype == "bfloat16" else 4) / hardware.wire
    steps = config.parallel.cp - 1
    return {
        "ring": steps * (max(sending - computing, 0.0) + EXCHANGE),
        "gather": steps * sending + EXCHANGE,
    }
