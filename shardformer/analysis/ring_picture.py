"""A picture of ring attention: which shard computes which chunks of queries and keys, and in which turn."""

from pathlib import Path

from shardformer.analysis.pictures import BLUE, GREEN, ORANGE, PINK, figure

COLOURS = (BLUE, ORANGE, GREEN, PINK)


def turns_of_chunks(cp: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns {(chunk of queries, chunk of keys): (shard, turn)} of the pairs that a causal mask leaves."""
    holder = {chunk: min(chunk, 2 * cp - 1 - chunk) for chunk in range(2 * cp)}
    return {
        (row, column): (holder[row], (holder[row] - holder[column]) % cp)
        for row in range(2 * cp)
        for column in range(row + 1)
    }


def draw_ring_steps(cp: int, path: str | Path) -> None:
    """Draws the pairs of chunks, coloured by shard and numbered by turn."""
    from matplotlib.patches import Rectangle

    with figure(path, 1.0 + 0.6 * 2 * cp, 1.2 + 0.6 * 2 * cp) as drawn:
        ax = drawn.subplots()
        for (row, column), (shard, ring_step) in turns_of_chunks(cp).items():
            colour = COLOURS[shard % len(COLOURS)]
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white"))
            ax.text(column + 0.5, row + 0.5, f"{shard}:{ring_step}", ha="center", va="center", fontsize=9)
        ax.set_xlim(0, 2 * cp)
        ax.set_ylim(2 * cp, 0)
        ax.set_aspect("equal")
        ax.set_xlabel("chunk of keys")
        ax.set_ylabel("chunk of queries")
        ticks = [chunk + 0.5 for chunk in range(2 * cp)]
        ax.set_xticks(ticks, range(2 * cp))
        ax.set_yticks(ticks, range(2 * cp))
        drawn.suptitle(f"shard:turn of each pair, cp={cp}", fontsize=11)
