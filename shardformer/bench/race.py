"""`bench race`: the validation loss against CPU seconds, ours and other implementations on the same batches.

All start from the same parameters and train the same model, so only the time to a loss differs. The losses of all are
computed by one evaluation of ours, which is not timed.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator

import jax
import numpy as np

from shardformer import data, storage
from shardformer.bench.bench_options import Measuring
from shardformer.bench.contenders import Contender, ours, stack
from shardformer.bench.step_time import PEERS, check_same_loss, choose_peers, describe_machine, why_not
from shardformer.config import Config
from shardformer.layout import mesh
from shardformer.tables import format_table
from shardformer.training.evaluation import Evaluator
from shardformer.training.trainer import Trainer

RACERS = ("plain", "partitioned", "torch", "torch_compile")  # the peers that can return their parameters
AUTOMATIC = ("plain", "torch", "torch_compile")


@dataclasses.dataclass
class Track:
    """A contender, and what was measured after each of its turns."""

    contender: Contender
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)  # of the steps; compiling is not included
    seconds: list[float] = dataclasses.field(default_factory=list)
    nats: list[float] = dataclasses.field(default_factory=list)  # per byte of the validation text

    def run(self, steps: int) -> None:
        """Runs a turn and adds its times."""
        cpu_before, started = self.contender.cpu_seconds, time.perf_counter()
        self.contender.run(steps)
        self.seconds.append(_last(self.seconds) + time.perf_counter() - started)
        self.cpu_seconds.append(_last(self.cpu_seconds) + self.contender.cpu_seconds - cpu_before)


class TurnBatches:
    """The batches of the current turn, by step: read before the turn, so that no reading is timed."""

    def __init__(self, stream: Iterator):
        self._stream, self._read = stream, 0
        self._batches: dict[int, dict] = {}

    def read(self, steps: int) -> None:
        """Reads the batches of the next steps in place of the current ones."""
        first, self._read = self._read, self._read + steps
        self._batches = {step: dict(next(self._stream)) for step in range(first, self._read)}

    def __getitem__(self, step: int):
        return self._batches[step]


def bench_race(options: Measuring, settings: Config) -> None:
    """Trains ours and its peers interleaved on the same batches; prints and draws loss against time."""
    names = choose_peers(options, lambda name: why_not(name, settings), RACERS, AUTOMATIC)
    corpus = data.load_corpus(settings)
    settings = mesh.start(corpus.adapt(settings))
    stream = corpus.train_batches(settings)
    try:
        tracks = race(names, settings, corpus, TurnBatches(stream), options.rounds)
    finally:
        stream.close()
    title = (
        f"{options.preset}: {settings.training.steps} steps of {settings.training.batch} x {settings.model.seq} tokens "
        f"of {corpus.name}, on {describe_machine()}"
    )
    print("\n".join([title, format_tracks(tracks)]))
    if options.json:
        storage.on_disk(options.json, "json").write_text(json.dumps(to_record(title, tracks), indent=2) + "\n")
    if options.picture:
        draw(tracks, title, options.picture)


def race(names: list[str], c: Config, corpus, batches: TurnBatches, rounds: int) -> list[Track]:
    """Returns the tracks of the peers and of ours, which come last; each evaluates after each of `rounds` turns.

    The first step compiles and is not timed.
    """
    batches.read(1)
    contenders = [PEERS[name](c, batches) for name in names] + [ours(c, batches, f"shardformer {c.parallel.mesh}")]
    losses = {contender.name: contender.run(1) for contender in contenders}
    print(check_same_loss(losses, c))
    tracks = [Track(contender) for contender in contenders]
    evaluator = Evaluator(Trainer(c, mesh.make(c)), corpus)
    ends = np.unique(np.linspace(1, c.training.steps, rounds + 1).astype(int))
    for before, end in itertools.pairwise(ends.tolist()):
        batches.read(end - before)
        for track in tracks:
            track.run(end - before)
        for track in tracks:
            track.nats.append(evaluate(evaluator, track.contender.read_parameters()))
        print(f"step {end}: " + ", ".join(f"{t.contender.name} {t.nats[-1]:.4f}" for t in tracks), flush=True)
    return tracks


def evaluate(evaluator: Evaluator, parameters) -> float:
    """Returns the nats per byte of the validation text under parameters with a module for each layer."""
    placed = jax.device_put(stack(parameters), evaluator.trainer.model.shardings)
    result = evaluator.evaluate("validation", placed, evaluator.trainer.config.run.eval_batches or 0)
    return result.loss if result.nats_per_byte is None else result.nats_per_byte


def format_tracks(tracks: list[Track]) -> str:
    """Returns a table: each contender's final loss, its times, and the time to the loss that all have reached."""
    target, ours_last, rows = max(min(track.nats) for track in tracks), tracks[-1], []
    for track in tracks:
        reached = next((i for i, nats in enumerate(track.nats) if nats <= target), -1)
        times = f"{track.cpu_seconds[-1]:.1f}", f"{track.cpu_seconds[reached]:.1f}", f"{track.seconds[-1]:.1f}"
        slower = f"{track.seconds[-1] / ours_last.seconds[-1]:.2f}"
        rows.append([track.contender.name, f"{track.nats[-1]:.4f}", *times, slower])
    return format_table(rows, ["", "nats/byte", "CPU s", f"CPU s to {target:.4f}", "s", "s / ours"])


def to_record(title: str, tracks: list[Track]) -> dict:
    """Returns the tracks for a JSON file."""
    measured = [
        {"name": t.contender.name, "cpu seconds": t.cpu_seconds, "seconds": t.seconds, "nats per byte": t.nats}
        for t in tracks
    ]
    return {"title": title, "tracks": measured}


def draw(tracks: list[Track], title: str, path: str) -> None:
    """Draws the loss against CPU seconds and against seconds."""
    from shardformer.analysis.pictures import BLUE, GREEN, ORANGE, RED, SKY, figure

    colours = [SKY, GREEN, ORANGE, RED]
    with figure(path, 10, 4) as drawn:
        by_cpu, by_clock = drawn.subplots(1, 2, sharey=True)
        for track, colour in zip(tracks, [*colours[: len(tracks) - 1], BLUE], strict=True):
            label, wide = track.contender.name, 2.5 if colour == BLUE else 1.5
            by_cpu.plot(track.cpu_seconds, track.nats, color=colour, label=label, linewidth=wide)
            by_clock.plot(track.seconds, track.nats, color=colour, linewidth=wide)
        by_cpu.set_ylabel("validation loss, nats per byte")
        by_cpu.set_xlabel("CPU seconds of training")
        by_clock.set_xlabel("seconds of training")
        by_cpu.legend(frameon=False)
        drawn.suptitle(title.partition(", on ")[0])


def _last(values: list[float]) -> float:
    return values[-1] if values else 0.0
