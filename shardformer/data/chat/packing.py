"""Best-fit packing: documents of any length into rows of one capacity."""

import bisect

import numpy as np


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Returns the indices of the documents in each row.

    Documents are taken from the longest to the shortest; each goes into the row with the least space that fits it.
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # indices of rows by their space
    spaces: list[int] = []  # the spaces of all open rows, sorted
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        position = bisect.bisect_left(spaces, length)
        if position < len(spaces):
            space = spaces[position]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[position]
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        left = space - length
        if left not in by_space:
            by_space[left] = []
            bisect.insort(spaces, left)
        by_space[left].append(row)
    return rows
