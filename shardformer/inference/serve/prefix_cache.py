"""The chunks of contexts that were read before, which later requests with the same beginning need not read again."""

import collections
import hashlib

import jax
import numpy as np

from shardformer.inference.serve.jobs import Job
from shardformer.inference.serve.slot_programs import SlotPrograms
from shardformer.kernels.attention import SLOTS, Cache


class PrefixCache:
    """Keys and values of chunks without padding; of at most `most_bytes`, the least recently used go first.

    A chunk's name has all on which its bits depend: the weights, the size of its row, and every chunk up to its end.
    """

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._chunks: collections.OrderedDict[bytes, list[Cache]] = collections.OrderedDict()  # a row's caches each
        self.bytes = 0
        self.found_tokens = 0  # that were not read again

    def name_chunks(self, job: Job, programs: SlotPrograms) -> dict[int, bytes]:
        """Returns the names of the chunks of a context that can be stored, by the position of their first token."""
        assert job.weights is not None
        length, names, position = len(job.seen), dict[int, bytes](), 0
        is_long = length > programs.model.config.model.longest_short_row  # of longrope, whose frequencies differ
        name = repr((job.weights.number, job.size, is_long)).encode()
        while programs.least_stored(length) <= (size := programs.choose_chunk(length, position)) <= length - position:
            chunk = np.array(job.seen[position : position + size], np.int32)
            name = names[position] = hashlib.sha256(name + chunk.tobytes()).digest()
            position += size
        return names

    def find(self, job: Job) -> list[list[Cache]]:
        """Returns the stored chunks that continue what a job has read. The context's last token is always read."""
        found, end = [], job.stored
        for position, name in job.chunks.items():
            if position < job.stored:
                continue
            chunk = self._chunks.get(name)
            if chunk is None or end + count_tokens(chunk) >= len(job.seen):
                break
            found.append(chunk)
            end += count_tokens(chunk)
        self.found_tokens += end - job.stored
        self._use(job)
        return found

    def __contains__(self, name: bytes) -> bool:
        return name in self._chunks

    def add(self, job: Job, position: int, chunk: list[Cache]) -> None:
        """Stores the chunk of a job's context at a position."""
        self._chunks[job.chunks[position]] = chunk
        self.bytes += _count_bytes(chunk)
        self._use(job)
        while self.bytes > self._most_bytes:
            _, dropped = self._chunks.popitem(last=False)
            self.bytes -= _count_bytes(dropped)

    def clear(self) -> None:
        self._chunks.clear()
        self.bytes = 0

    def _use(self, job: Job) -> None:
        """Makes the chunks of a context the last to go, the first of them the very last.

        A context that is too long for the cache would else drop what it needs next, chunk after chunk.
        """
        for name in reversed(job.chunks.values()):
            if name in self._chunks:
                self._chunks.move_to_end(name)


def count_tokens(chunk: list[Cache]) -> int:
    return chunk[0].k_BhSK.shape[SLOTS]


def _count_bytes(chunk: list[Cache]) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(chunk))
