"""The keys of a generation, which are no keys of a run."""

import dataclasses

from shardformer.config.keys import key
from shardformer.errors import UsageError

MOST_SAMPLES = 2**16  # per prompt
MOST_TOKENS = 10_000_000  # of one text: more would run for days without a result


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The keys of a generation: how many tokens, and how each is drawn.

    >>> from shardformer import Sampling
    >>> Sampling(tokens=20, temperature=0).top_k
    0
    >>> Sampling(tokens=0)
    Traceback (most recent call last):
    shardformer.errors.UsageError: tokens must be at least 1, got 0
    """

    tokens: int = key(500, "number of tokens to generate; ids that the tokenizer lacks are never drawn, which "
                           "transformers may do")  # fmt: skip
    temperature: float = key(0.8, "divides the logits before sampling; 0 always takes the most likely token")
    top_k: int = key(0, "sample among the k most likely tokens; 0 means all")
    top_p: float = key(1.0, "sample among the most likely tokens that together reach this probability; tokens as "
                            "likely as the last of them stay, which transformers drops")  # fmt: skip
    min_p: float = key(0.0, "sample among the tokens with at least this share of the most likely one's probability")
    repetition_penalty: float = key(1.0, "above 1 makes tokens of the context less likely, as in CTRL; 1 means none")
    samples: int = key(1, f"number of texts per prompt, at most {MOST_SAMPLES:,}")
    seed: int = key(0, "seed of the random draws; the same seed gives the same text")
    ignore_eos: bool = key(False, "continue after the model's end of text, such as <|endoftext|>")
    stride: int = key(1, "tokens dropped at once when the context is full; 1 keeps it full, more is faster")

    def __post_init__(self):
        def need(holds, message):
            if not holds:
                raise UsageError(message)

        for name in ("tokens", "samples", "stride"):
            need(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        need(self.samples <= MOST_SAMPLES, f"samples must be at most {MOST_SAMPLES:,}, got {self.samples:,}; "
             "for more, run again with another seed=")  # fmt: skip
        need(self.tokens <= MOST_TOKENS, f"tokens must be at most {MOST_TOKENS:,}, got {self.tokens:,}")
        for name in ("top_k", "seed"):
            need(0 <= getattr(self, name) < 2**31, f"{name} must be in 0..2**31 - 1, got {getattr(self, name)}")
        need(0 <= self.temperature < float("inf"), f"temperature must be 0 or more, got {self.temperature}")
        need(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")
        need(0 <= self.min_p <= 1, f"min_p must be in 0..1, got {self.min_p}")
        need(0.01 <= self.repetition_penalty <= 100,
             f"repetition_penalty must be in 0.01..100, got {self.repetition_penalty}")  # fmt: skip
