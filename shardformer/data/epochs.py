"""The steps of `epochs=`, which are counted when the data are open."""

import math
from fractions import Fraction

from shardformer.config import Config
from shardformer.data.batches import Data
from shardformer.data.corpus import Corpus, choose_row_layout, select_rows
from shardformer.errors import UsageError
from shardformer.messages import log


def count_steps(config: Config, corpus: Data) -> Config:
    """Returns the configuration with the steps in which a run reads its training data `epochs` times, rounded up."""
    epochs, repeats = config.training.epochs, config.objective.steps_of_a_batch
    rows = count_rows(config, corpus)
    # As a decimal: 0.1 of 30 rows are 3.
    steps = math.ceil(Fraction(str(epochs)) * rows / config.data_rows) * repeats
    again = f", each learned from {repeats} times" if repeats > 1 else ""
    log.info(f"epochs={epochs:g} of {rows:,} rows in batches of {config.data_rows:,}{again}: steps={steps}")
    counted = config.replace(epochs=0.0, steps=steps)  # checks the keys that name a step
    return counted.replace(epochs=epochs)


def count_rows(config: Config, corpus: Data) -> int:
    """Returns the rows that training reads before one of them comes again."""
    counts = f"epochs={config.training.epochs:g} counts"
    if not isinstance(corpus, Corpus):
        raise UsageError(f"{counts} rows, and {corpus.name} has no end; give steps=")
    if config.data.order == "random":
        raise UsageError(f"{counts} rows, which order=random draws without end; give steps=")
    if (mixed := len(corpus.sources)) > 1:
        raise UsageError(
            f"{counts} the rows of one source, and data={corpus.name} mixes {mixed} by their weights; give steps="
        )
    layout = choose_row_layout(config)
    [split] = select_rows(corpus.splits("train"), layout)
    return split.make_windows(layout).count
