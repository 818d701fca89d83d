"""Tokens and their log-probabilities as OpenAI's entries."""

from typing import Any

from shardformer.data import Vocabulary
from shardformer.inference.serve.jobs import Tokens, Top
from shardformer.inference.serve.text_stream import INCOMPLETE


class TokenEntries:
    """The entries of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary

    def describe(self, tokens: Tokens) -> list[dict[str, Any]]:
        """Returns the entry of each token, with those of the most likely ones at its position."""
        return [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*pair) for pair in top]}
            for token, logprob, top in zip(*tokens, strict=True)
        ]

    def list_top(self, top: Top, token: int, logprob: float) -> dict[str, float]:
        """Returns the most likely tokens by their text, the drawn one among them."""
        result: dict[str, float] = {}
        for other, value in [*top, (token, logprob)]:
            result.setdefault(self.spell(other), value)
        return result

    def spell(self, token: int) -> str:
        """Returns a token's text; token_id:N if it is not the text of complete characters."""
        text = self._decode_alone(token)
        return f"token_id:{token}" if text is None else text

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode_alone(token)
        content = None if text is None else list(text.encode("utf-8", "replace"))
        return {"token": self.spell(token), "logprob": logprob, "bytes": content}

    def _decode_alone(self, token: int) -> str | None:
        """Returns a token's text; None for a part of a character, and for entries that only the model has."""
        text = self._vocabulary.decode([token]) if token < len(self._vocabulary) else INCOMPLETE
        return None if INCOMPLETE in text else text
