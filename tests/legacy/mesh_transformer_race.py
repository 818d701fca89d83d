"""Step times of mesh-transformer-jax under several versions of jax, in one run in which their processes take turns.

It prints wall milliseconds and CPU milliseconds of all threads; on a busy machine only the latter can be compared.

MESH_TRANSFORMER_JAX=<checkout> python tests/legacy/mesh_transformer_race.py <python> <another python> ...
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

STEPS = 5


def race(pythons, rounds):
    """The median (wall, CPU) seconds of a step for each of `pythons`, without the first round, which compiles."""
    # As many threads as cores, as XLA has by itself: every step is waited for, and none needs the patience of tests.
    environment = {"NPROC": str(os.cpu_count())} | os.environ
    with contextlib.ExitStack() as open_files:
        errors = [open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in pythons]
        racers = [
            subprocess.Popen(
                [python, __file__, "--steps"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
            )
            for python, error in zip(pythons, errors, strict=True)
        ]
        times = [[] for _ in racers]
        for turn in range(rounds + 1):
            for place, racer in enumerate(racers):
                new = ask_for_steps(racer, pythons[place], errors[place])
                times[place] += new if turn else []
        for racer in racers:
            racer.communicate()
    return [tuple(map(statistics.median, zip(*measured, strict=True))) for measured in times]


def ask_for_steps(racer, python, errors):
    """Returns the times of a racer's next steps; ends this program with the racer's last lines if it has died."""
    with contextlib.suppress(BrokenPipeError):
        print(file=racer.stdin, flush=True)
    if answer := racer.stdout.readline():
        return json.loads(answer)
    status = racer.wait()
    errors.seek(0)
    last_lines = "".join(f"  {line}" for line in errors.readlines()[-10:])
    raise SystemExit(f"{python} ended with status {status} before its steps. Its last lines:\n{last_lines}")


def take_steps():
    """Takes STEPS steps for every line of input, and prints their times: 4 layers of 256, 1,024 tokens, mesh 4x2."""
    import mesh_transformer_driver as driver

    case = driver.Case("rotary", 4, 2, f32=False)
    larger = {"layers": 4, "d_model": 256, "n_vocab": 1024, "seq": 256, "pe_rotary_dims": 16}
    text = driver.tokens(case, 0, 1, seq=256, vocabulary=1024)
    with driver.mesh_of(case), contextlib.redirect_stdout(sys.stderr):
        config = driver.config_of(case, optimizer=driver.optimizer_of(case), **larger)
        network = driver.transformer_shard.CausalTransformer(config)
        for _ in sys.stdin:
            print(
                json.dumps([timed_step(driver.jax, network, text) for _ in range(STEPS)]),
                file=sys.__stdout__,
                flush=True,
            )


def timed_step(jax, network, text):
    started, started_cpu = time.perf_counter(), time.process_time()
    network.train(text)
    jax.block_until_ready(network.state)
    return time.perf_counter() - started, time.process_time() - started_cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", action="store_true", help="be one of the processes")
    given = parser.parse_args()
    if given.steps:
        return take_steps()
    medians = race(given.pythons, given.rounds)
    for python, seconds in zip(given.pythons, medians, strict=True):
        wall, cpu = (f"{1e3 * own:.0f} ms ({first / own:.2f})" for own, first in zip(seconds, medians[0], strict=True))
        print(f"{python}: wall {wall}, CPU {cpu}; in brackets the speed relative to the first one")


if __name__ == "__main__":
    main()
