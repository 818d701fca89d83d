"""A tokenizer of bytes."""


class GPT2TokenizerFast:
    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return " ".join(map(str, tokens))
