"""Text to tokens to batches."""

from shardformer.data.batches import eval_batch_count, eval_batches, train_batches
from shardformer.data.corpus import Corpus, load_corpus
from shardformer.data.shakespeare import import_shakespeare
from shardformer.data.vocabulary import Vocabulary, check_same_data

__all__ = [
    "Corpus",
    "Vocabulary",
    "check_same_data",
    "eval_batch_count",
    "eval_batches",
    "import_shakespeare",
    "load_corpus",
    "train_batches",
]
