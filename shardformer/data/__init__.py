"""Text to tokens to batches."""

from shardformer.data.batches import Data
from shardformer.data.choose_vocabulary import open_vocabulary
from shardformer.data.corpus import Corpus, load_corpus
from shardformer.data.special_tokens import SpecialTokens, load_special_tokens
from shardformer.data.stored_vocabulary import check_same_data, load_vocabulary
from shardformer.data.vocabulary import Characters, TokenIds, Vocabulary

__all__ = [
    "Characters",
    "Corpus",
    "Data",
    "SpecialTokens",
    "TokenIds",
    "Vocabulary",
    "check_same_data",
    "load_corpus",
    "load_special_tokens",
    "load_vocabulary",
    "open_vocabulary",
]
