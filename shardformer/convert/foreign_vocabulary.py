"""The vocabulary of a model from elsewhere, and its data if some is given."""

from shardformer import data
from shardformer.config import Config
from shardformer.data import Vocabulary
from shardformer.errors import UsageError


def open_vocabulary(config: Config, say, first: int | None = None) -> tuple[Config, Vocabulary, str]:
    """Returns the configuration, the vocabulary of `tokenizer` and the fingerprint of `data`; both keys are optional.

    first: the beginning of text that the model was published with, for bos=true.
    """
    vocabulary = data.open_vocabulary(
        config.data.tokenizer, config.model.vocab, config.data.special_tokens, config.data.bos, first
    )
    if vocabulary.notice:
        say(vocabulary.notice)
    if len(vocabulary) > config.model.vocab:
        raise UsageError(
            f"tokenizer={config.data.tokenizer} has {len(vocabulary)} entries, and the model predicts "
            f"{config.model.vocab}; "
            "give the tokenizer that it was trained with"
        )
    config = config.replace(tokenizer=vocabulary.name)
    if config.data.source == "auto":
        return config.replace(data=""), vocabulary, ""
    corpus = data.load_corpus(config, say, vocabulary)
    return config.replace(data=corpus.name), vocabulary, corpus.fingerprint
