"""Three processes that save into a bucket and die: `python -m tests.checkpoint.writers OUT`.

Each line of standard input is a round, "STEP VICTIM PUT SIGNAL": three processes save a step together, and the victim
gives itself the signal just before it puts the object of that number, the lease not counted. A line "ended ..." of
standard output ends a round: the puts of each process, or "dead". They are forked, so that JAX is imported once.
"""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint
from shardformer.checkpoint import bucket_store, stores
from shardformer.checkpoint.lock import NAME
from shardformer.storage import bucket, location
from tests.launch import free_port

PROCESSES = 3
PART = 1000  # bytes, so that each process writes three parts
ROWS = 3 * 600


def value(step: int) -> np.ndarray:
    return np.arange(ROWS, dtype=np.float32) + step


def count_puts(at: int, number: int) -> list[str]:
    """Notes the puts to come, and gives this process the signal before the one of the number `at`."""
    put, made = bucket._put, []

    def counted(path, content, mode):
        if path.name != NAME:
            if len(made) == at:
                os.kill(os.getpid(), number)
            made.append(path.name)
        return put(path, content, mode)

    bucket._put = counted
    return made


def save_together(out, step: int, process: int, port: int, at: int, number: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, process)
    stores._BUCKET = bucket_store.BucketStore(part=PART)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
    state = {"x": jax.make_array_from_callback((ROWS,), sharding, lambda index: value(step)[index])}
    made = count_puts(at, number)
    if process == 0:
        with checkpoint.lock_folder(out) as lock:
            checkpoint.save(out, step, state, {"progress.json": "{}"}, lock)
    else:
        checkpoint.save(out, step, state, {"progress.json": "{}"})
    os._exit(100 + len(made))


def run_round(out, step: int, victim: int, at: int, number: int) -> str:
    """All are killed once one is dead, as on a pod that is preempted, but a moment later: nobody may publish."""
    port, running = free_port(), {}
    for process in range(PROCESSES):
        if not (child := os.fork()):
            save_together(out, step, process, port, at if process == victim else -1, number)
        running[child] = process
    ends = {}
    while running:
        child, status = os.wait()
        ends[running.pop(child)] = str(os.waitstatus_to_exitcode(status) - 100) if os.WIFEXITED(status) else "dead"
        if "dead" in ends.values() and running:
            time.sleep(0.3)
            for other in running:
                os.kill(other, signal.SIGKILL)
    return " ".join(["ended", *(ends[process] for process in range(PROCESSES))])


if __name__ == "__main__":
    for line in sys.stdin:
        print(run_round(location(sys.argv[1]), *map(int, line.split())), flush=True)
