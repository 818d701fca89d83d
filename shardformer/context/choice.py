"""The choice between a ring and a gather: by the memory of keys and values, and by the time that a layer waits.

A ring hides each send behind the computation of its turn, and pays for cp - 1 exchanges. A gather hides nothing, and
pays for one.
"""

from typing import NamedTuple

from shardformer.config import Config

EXCHANGE = 5e-6  # seconds that an exchange takes beside its bytes: an assumption, no device was measured


class Rates(NamedTuple):
    """The rates of a device, per second; 0: unknown."""

    flops: float = 0.0
    wire: float = 0.0  # bytes over the links of one mesh axis


UNKNOWN = Rates()


class Choice(NamedTuple):
    """A way to the tokens of other shards, and the reason for it in words."""

    way: str
    reason: str


def choose_way(config: Config, rates: Rates = UNKNOWN) -> Choice:
    """Chooses the gather if it takes no more memory than the queries and, at these rates, no more time than a ring."""
    if config.context_parallel != "auto":
        return Choice(config.context_parallel, "as context_parallel= says")
    share = 2 * config.cp * config.key_value_heads / config.heads
    memory = f"keys and values of complete rows take {share:.3g} times the memory of a shard's queries"
    if share > 1:
        return Choice("ring", memory)
    if not rates.flops:
        return Choice("gather", memory)
    waits = {way: 1e6 * seconds for way, seconds in find_waits(config, rates).items()}
    way = "gather" if waits["gather"] <= waits["ring"] else "ring"
    return Choice(way, f"a layer waits {waits['ring']:,.0f} us with a ring, {waits['gather']:,.0f} us with a gather")


def find_waits(config: Config, rates: Rates) -> dict[str, float]:
    """Returns the seconds that a layer's forward pass waits for keys and values, by way."""
    own = config.seq // config.cp
    rows = config.batch // max(config.accum, 1) / config.dp
    pairs = rows * own * own / 2  # of tokens in a turn: zig-zag order halves the work of every turn
    computing = 4 * pairs * config.attention_size / config.mp / rates.flops
    width = config.key_value_heads * config.head_size / config.mp
    sending = 2 * rows * own * width * (2 if config.dtype == "bfloat16" else 4) / rates.wire
    turns = config.cp - 1
    return {
        "ring": turns * (max(sending - computing, 0.0) + EXCHANGE),
        "gather": turns * sending + EXCHANGE,
    }
