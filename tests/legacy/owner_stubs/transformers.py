"""GPT-2's tokenizer as transformers reads it from a folder of this name."""

from tokenizers import Tokenizer


class GPT2TokenizerFast:
    eos_token = "<|endoftext|>"
    max_model_input_sizes = {}  # noqa: RUF012  as it was: scripts write to it

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.token_to_id(self.eos_token)

    @classmethod
    def from_pretrained(cls, name):
        return cls(Tokenizer.from_file(f"{name}/tokenizer.json"))

    def encode(self, text):
        return self._tokenizer.encode(text).ids

    def decode(self, tokens):
        return self._tokenizer.decode(list(map(int, tokens)))
