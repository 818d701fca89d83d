"""A vocabulary of single bytes and ChatML's markers."""

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from shardformer.data.hf_tokenizer import HfTokenizer


@functools.cache
def make_vocabulary() -> HfTokenizer:
    """Returns single bytes, so that most characters beyond ASCII are two or more tokens, and ChatML's markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return HfTokenizer("TEST", tokenizer.to_str())
