"""The choice between a ring and a gather for a context that is split over shards.

It goes by the memory of keys and values, and by the time that a layer waits. A ring hides each send behind the
computation of its step, and pays for cp - 1 exchanges. A gather hides nothing, and pays for one.
"""

from shardformer.config import Config
from shardformer.devices.chips import Hardware
from shardformer.kernels.attention import Attention
from shardformer.kernels.blockwise_attention import block_size
from shardformer.layout.attention_limits import Choice, NoKernel, Rows, reason_against_kernel
from shardformer.parallel.ring_attention import Gathered, Ring

EXCHANGE = 5e-6  # latency in seconds of an exchange besides its bytes: an assumption, no device was measured


def choose_in_context(config: Config, hardware: Hardware, rows: Rows) -> Choice:
    """Chooses between a ring of kernels, a ring in blocks, and a gather."""
    reason = reason_against_ring(config, hardware, rows)
    if not reason:
        return Choice(Ring(block=0), "the kernel computes the steps of a ring")
    if config.parallel.attention == "fused":
        return Choice(NoKernel(f"attention=fused: {reason}; give attention=auto"), reason)
    method, why = choose_ring_or_gather(config, hardware)
    block = choose_block(config, rows.tokens)
    return Choice(Ring(block=block) if method == "ring" else Gathered(block=block), f"{why} (no kernel: {reason})")


def make_ring_of_blocks(config: Config, rows: Rows) -> Attention:
    """Returns a ring in blocks, which can be traced without a device."""
    return Ring(block=choose_block(config, rows.tokens))


def choose_block(config: Config, tokens: int) -> int:
    """Returns the tokens of a block of a shard that has `tokens` tokens: a chunk, or a divisor of it in long rows."""
    chunk = tokens // 2
    if config.parallel.attention == "plain" or (
        config.parallel.attention == "auto" and tokens * config.parallel.cp < 1024
    ):
        return chunk
    most = block_size(chunk)
    return next(size for size in range(most, 0, -1) if chunk % size == 0)


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
    sizes = config.model.head_size + config.model.value_size
    computing = 2 * pairs * config.model.heads * sizes / config.parallel.mp / hardware.flops
    width = config.model.key_value_heads * sizes / config.parallel.mp
    sending = rows * tokens * width * (2 if config.parallel.dtype == "bfloat16" else 4) / hardware.wire
    steps = config.parallel.cp - 1
    return {
        "ring": steps * (max(sending - computing, 0.0) + EXCHANGE),
        "gather": steps * sending + EXCHANGE,
    }
