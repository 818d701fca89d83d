"""The choice of the attention method, with its reason: a device's kernel, blocks, or all pairs of tokens at once."""

from shardformer.config import Config
from shardformer.devices.chips import CPU, Hardware
from shardformer.kernels.attention import Attention, Plain
from shardformer.layout.attention_limits import Choice, NoKernel, Rows, reason_against_kernel


def choose_attention(config: Config, hardware: Hardware, rows: Rows) -> Choice:
    """Chooses the devices' kernel if it can do the job, else blocks from 1,024 tokens on (faster on a CPU)."""
    if config.parallel.cp > 1:
        from shardformer.layout.choose_context import choose_in_context  # not imported for complete rows

        return choose_in_context(config, hardware, rows)
    reason = f"attention={config.parallel.attention}"
    if config.parallel.attention in ("auto", "fused"):
        reason = reason_against_kernel(config, hardware, rows)
        if not reason:
            from shardformer.kernels.fused_attention import Kernel  # not imported on a CPU

            return Choice(Kernel(hardware.platform), "the devices have a kernel")
        if config.parallel.attention == "fused":
            return Choice(NoKernel(f"attention=fused: {reason}; give attention=auto"), reason)
    if config.parallel.attention == "blocks" or (config.parallel.attention == "auto" and rows.tokens >= 1024):
        return Choice(_make_blocks(rows), reason)
    return Choice(Plain(_choose_groups(config, hardware, rows.tokens)), reason)


def without_kernel(attention: Attention, config: Config, rows: Rows) -> Attention:
    """Returns attention in blocks, which keep as little as a kernel, and can be traced without its device."""
    if not attention.uses_kernel and not isinstance(attention, NoKernel):
        return attention
    in_blocks = config.replace(attention="blocks")
    if config.parallel.cp == 1:
        return _make_blocks(rows)
    if isinstance(attention, NoKernel):
        return choose_attention(in_blocks, CPU, rows).attention
    from shardformer.layout.choose_context import make_ring_of_blocks  # not imported for complete rows

    return make_ring_of_blocks(in_blocks, rows)


def _make_blocks(rows: Rows) -> Attention:
    from shardformer.kernels.blockwise_attention import Blocks, block_size  # not imported for short rows

    return Blocks(block_size(rows.tokens))


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
