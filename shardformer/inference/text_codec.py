"""Documents to ids and back under a trained model: its beginning of text, its ends of text and its special tokens."""

from typing import Literal

from shardformer.data import SpecialTokens, Vocabulary
from shardformer.errors import UsageError

Switch = Literal["auto", "true", "false"]


class TextCodec:
    """The vocabulary of a model with the special ids that the model was published with.

    Arguments:
      special: the ids that a published model names; empty for a model that was trained here.
      bos: true starts every text with the beginning of text; auto follows the vocabulary.
      special_tokens: true reads '<|endoftext|>' in a text as its id; auto follows the vocabulary.
      published: the model was not trained here. auto then follows the tokenizer, as transformers does.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialTokens | None = None,
        bos: Switch = "auto",
        special_tokens: Switch = "auto",
        published: bool = False,
    ):
        special = special or SpecialTokens()
        self.vocabulary = _recognise_special_tokens(vocabulary, special_tokens, published)
        self.beginning = self._choose_beginning(bos, special, published)
        self.ends = self._collect_ends(special, published)
        self.prefix = self._choose_prefix(special)

    def _collect_ends(self, special: SpecialTokens, published: bool) -> frozenset[int]:
        """Returns the ids that end a text: those of the model; after training here, the separator of documents too."""
        ends = {*special.ends, special.tokenizer_end}
        if not (published and special.ends):
            ends.add(self.vocabulary.end_of_text)
        return frozenset(token for token in ends if token is not None)

    def _choose_prefix(self, special: SpecialTokens) -> int:
        """Returns the context of a text that has none, as lm-eval chooses it: the tokenizer's bos, else its eos."""
        if special.tokenizer_end is None:
            named = [special.beginning, self.vocabulary.first_id, *special.ends[:1]]
        else:
            named = [special.tokenizer_beginning, special.tokenizer_end]
        named += [self.vocabulary.end_of_text, int(self.vocabulary.first_ids()[-1])]
        return next(token for token in named if token is not None and token < len(self.vocabulary))

    def _choose_beginning(self, bos: Switch, special: SpecialTokens, published: bool) -> list[int]:
        vocabulary = self.vocabulary
        if bos == "false":
            return []
        if bos == "auto":
            return list(vocabulary.template if published else vocabulary.beginning)
        if result := vocabulary.beginning or vocabulary.template:
            return list(result)
        if special.first is None:
            raise UsageError(f"bos=true: tokenizer={vocabulary.name} has no beginning of text; leave bos out")
        return [special.first]

    def encode(self, text: str, source: str = "text") -> list[int]:
        """Encodes a text after the beginning, unless the text itself starts with it."""
        ids = self.encode_bare(text, source)
        begun = self.beginning and ids[: len(self.beginning)] == self.beginning
        return ids if begun else [*self.beginning, *ids]

    def encode_bare(self, text: str, source: str = "text") -> list[int]:
        """Encodes a text without a beginning."""
        return self.vocabulary.encode(text, source).tolist()

    def encode_all(self, texts: list[str], name: str) -> list[list[int]]:
        return [self.encode(text, f"{name} {i + 1}") for i, text in enumerate(texts)]

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.decode(ids)

    def decode_without_special_tokens(self, ids: list[int]) -> str:
        return self.vocabulary.decode_without_special_tokens([token for token in ids if token not in self.ends])


def _recognise_special_tokens(vocabulary: Vocabulary, wanted: Switch, published: bool) -> Vocabulary:
    if wanted == "auto":
        return vocabulary.with_special_tokens() if published else vocabulary
    return vocabulary.with_special_tokens(wanted == "true")
