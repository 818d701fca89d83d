"""The vocabulary of a model from elsewhere, and its data if some is given."""

from shardformer import data
from shardformer.config import Config
from shardformer.data import Vocabulary
from shardformer.errors import UsageError


def open_vocabulary(config: Config, say) -> tuple[Config, Vocabulary, str]:
    """(the configuration, the vocabulary of `tokenizer`, the fingerprint of `data`), which may both be left out."""
    vocabulary = data.open_vocabulary(config.tokenizer, config.vocab, config.special_tokens, config.bos)
    if vocabulary.notice:
        say(vocabulary.notice)
    if len(vocabulary) > config.vocab:
        raise UsageError(
            f"tokenizer={config.tokenizer} has {len(vocabulary)} entries, and the model predicts {config.vocab}; "
            "give the tokenizer that it was trained with"
        )
    config = config.replace(tokenizer=vocabulary.name)
    if config.data == "auto":
        return config.replace(data=""), vocabulary, ""
    corpus = data.load_corpus(config, say, vocabulary)
    return config.replace(data=corpus.name), vocabulary, corpus.fingerprint
