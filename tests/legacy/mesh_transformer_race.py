"""Step times of mesh-transformer-jax under several versions of jax, in one run in which their processes take turns.

MESH_TRANSFORMER_JAX=<checkout> python tests/legacy/mesh_transformer_race.py <python> <another python> ...
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

STEPS = 5


def race(pythons, rounds):
    """The median seconds of a step for each of `pythons`; the first round, which compiles, does not count."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    # As many threads as cores, as XLA has by itself: every step is waited for, and none needs the patience of tests.
    environment = {"NPROC": str(os.cpu_count())} | os.environ
    racers = [subprocess.Popen([python, __file__, "--steps"], env=environment, **pipes) for python in pythons]
    seconds = [[] for _ in racers]
    for turn in range(rounds + 1):
        for place, racer in enumerate(racers):
            print(file=racer.stdin, flush=True)
            times = json.loads(racer.stdout.readline())
            seconds[place] += times if turn else []
    for racer in racers:
        racer.communicate()
    return [statistics.median(times) for times in seconds]


def take_steps():
    """Takes STEPS steps for every line of input, and prints their seconds: 4 layers of 256, 1,024 tokens, mesh 4x2."""
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
    started = time.perf_counter()
    network.train(text)
    jax.block_until_ready(network.state)
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", action="store_true", help="be one of the processes")
    given = parser.parse_args()
    if given.steps:
        return take_steps()
    medians = race(given.pythons, given.rounds)
    for place, python in enumerate(given.pythons):
        print(f"{python}: {1e3 * medians[place]:.0f} ms, {medians[0] / medians[place]:.2f} times the first one's speed")


if __name__ == "__main__":
    main()
