"""`bench race recipe=NAME`: the loss that a recipe reaches on a fixed task, its p-value, and the recorded recipes.

The task: the model's size and the batches of `shakespeare_cpu`, on tiny_shakespeare by characters. A recipe is a table
of keys in speedrun.toml, with its `steps`. It reaches the target if a one-sided t-test of its seeds rejects a mean loss
above it. speedrun.csv has the loss of every recorded seed.
"""

import csv
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from scipy.special import stdtr  # JAX depends on scipy

from shardformer import data, storage
from shardformer.bench.bench_options import Measuring
from shardformer.bench.contenders import Contender
from shardformer.bench.race import TurnBatches
from shardformer.config import Config, parsing
from shardformer.config.presets import preset
from shardformer.config.registries import names_code
from shardformer.data.corpus import Corpus
from shardformer.data.shakespeare import URL
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.tables import format_table
from shardformer.training.evaluation import Evaluator
from shardformer.training.trainer import Trainer

TASK = "shakespeare_cpu"
TEXT = "b8e6008f919998e73d5b8d63e826b6480149721e805d624f3bf9b39bd598d195"  # the fingerprint of tiny_shakespeare
TARGET = 1.72  # nats per character of validation and test, the last tenth of the text
SIZES = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "seq", "batch", "tied")  # the same for all
PLAIN = ("base", "objective", "lora_rank", "weights", "ema", "experts")  # of other tasks: a race has none of them
RECIPES, RECORDED = Path(__file__).with_name("speedrun.toml"), Path(__file__).with_name("speedrun.csv")


class Seed(NamedTuple):
    """One run of a recipe, a row of speedrun.csv."""

    recipe: str
    seed: int
    steps: int
    validation: float  # nats per character after the last step
    test: float
    loss: float  # of both splits as one text
    cpu_seconds: float  # of the steps, on all cores; compiling and evaluating are not included

    @staticmethod
    def parse(row: list[str]) -> "Seed":
        """Returns the run of a row of the file."""
        name, seed, steps, *numbers = row
        return Seed(name, int(seed), int(steps), *map(float, numbers))

    def __str__(self) -> str:
        losses = ",".join(f"{loss:.4f}" for loss in (self.validation, self.test, self.loss))
        return f"{self.recipe},{self.seed},{self.steps},{losses},{self.cpu_seconds:.1f}"


def read_recipes() -> dict[str, dict]:
    """Returns the keys of each recipe. The file of an optimizer's code lies next to the recipes."""
    recipes = tomllib.loads(RECIPES.read_text())
    for keys in recipes.values():
        if names_code(keys.get("optimizer")):
            keys["optimizer"] = str(RECIPES.with_name(keys["optimizer"]))
    return recipes


def read_recorded() -> list[Seed]:
    """Returns the recorded runs, in the order of the file."""
    with RECORDED.open(newline="") as file:
        return [Seed.parse(row) for row in list(csv.reader(file))[1:]]


def make_settings(name: str, overrides: dict) -> Config:
    """Returns the configuration of a recipe; the keys of the user replace the recipe's."""
    recipes = read_recipes()
    if name not in recipes:
        raise UsageError(
            f"recipe takes one of {', '.join(recipes)}, got {name!r}{parsing.suggest_closest(name, recipes)}"
        )
    task = preset(TASK)
    settings = task.override({"mesh": "1x1", "out": ""} | recipes[name] | overrides)
    for key in (*SIZES, *PLAIN):
        if settings.get(key) != task.get(key):
            raise UsageError(
                f"all recipes race with {key}={task.shown(key)}, got {key}={settings.shown(key)}; leave it out"
            )
    return settings


def race_recipe(options: Measuring, settings: Config) -> None:
    """Trains a recipe from each seed, prints a row of each, and their table next to the recorded recipes."""
    corpus = data.load_corpus(settings)
    if corpus.fingerprint != TEXT:
        raise UsageError(
            f"recipes race on tiny_shakespeare, got data={corpus.name} with another text; give data=FILE with that of "
            f"{URL}"
        )
    seeds = []
    for seed in train(options, mesh.start(corpus.adapt(settings)), corpus):
        print(seed, flush=True)
        seeds.append(seed)
    print(format_recipes([*read_recorded(), *(seed._replace(recipe=f"{seed.recipe}, here") for seed in seeds)]))
    if options.json:
        rows = [seed._asdict() for seed in seeds]
        storage.on_disk(options.json, "json").write_text(json.dumps(rows, indent=2) + "\n")


def train(options: Measuring, c: Config, corpus: Corpus) -> Iterator[Seed]:
    """Trains from each seed in turn, by one compiled step."""
    trainer = Trainer(c, mesh.make(c))
    trainer.compile_step()
    evaluator = Evaluator(trainer, corpus)
    for number in range(c.training.seed, c.training.seed + options.seeds):
        yield train_seed(options.recipe, number, evaluator)


def train_seed(recipe: str, number: int, evaluator: Evaluator) -> Seed:
    """Trains from a seed, which chooses the initial parameters and the order of the batches, and evaluates."""
    trainer, held_out = evaluator.trainer, evaluator.corpus.held_out
    steps = trainer.config.training.steps
    stream = evaluator.corpus.train_batches(trainer.config.replace(seed=number))
    batches = TurnBatches(stream)
    batches.read(steps)
    stream.close()

    def step(state, at):
        return trainer.step(state, batches[at], at)

    state = trainer.start(trainer.model.init(number))
    contender = Contender(recipe, trainer.config.parallel.devices, step, state)
    contender.run(steps)
    losses = evaluator.evaluate_splits(held_out, contender.state.params)
    validation, test, both = (losses[split].loss for split in (*held_out, " + ".join(held_out)))
    return Seed(recipe, number, steps, validation, test, both, contender.cpu_seconds)


def find_p_value(losses: list[float]) -> float:
    """Returns the probability of a mean as low as this one if the true mean were the target (one-sided t-test)."""
    count = len(losses)
    error = statistics.stdev(losses) / math.sqrt(count)
    return float(stdtr(count - 1, (statistics.fmean(losses) - TARGET) / error))


def format_recipes(seeds: Iterable[Seed]) -> str:
    """Returns a table of recipes, the one with the fewest tokens last."""
    runs: dict[tuple[str, int], list[Seed]] = {}
    for seed in seeds:
        runs.setdefault((seed.recipe, seed.steps), []).append(seed)
    c, rows = preset(TASK), []
    for (recipe, steps), group in sorted(runs.items(), key=lambda item: -item[0][1]):
        losses = [seed.loss for seed in group]
        deviation, p_value = "-", "-"
        if len(group) > 1:
            deviation, p_value = f"{statistics.stdev(losses):.4f}", f"{find_p_value(losses):.1g}"
        tokens = steps * c.training.batch * c.model.seq
        seconds = statistics.median(seed.cpu_seconds for seed in group)
        rows.append(
            [recipe, steps, tokens, len(group), f"{statistics.fmean(losses):.4f}", deviation, p_value, f"{seconds:.1f}"]
        )
    return format_table(rows, ["recipe", "steps", "tokens", "seeds", "loss", "deviation", "p", "CPU s"])
