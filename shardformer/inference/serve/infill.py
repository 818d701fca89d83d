"""The field `suffix` of a completion: a text with a gap, which models of code were trained to fill."""

from shardformer.errors import UsageError
from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.text_codec import TextCodec
from shardformer.inference.tool_calls.tagged_calls import BAR

# The tokens before the prompt, before the suffix, and before what is written between them.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    (f"<{BAR}fim▁begin{BAR}>", f"<{BAR}fim▁hole{BAR}>", f"<{BAR}fim▁end{BAR}>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def join_around_gap(codec: TextCodec, before: list[int], after: list[int]) -> tuple[list[int], slice]:
    """Returns the ids of a prompt and of a suffix with the tokenizer's marks, and where among them the prompt is.

    Raises ApiError if the tokenizer has no marks.
    """
    for form in FORMS:
        found = [_encode_mark(codec, mark) for mark in form]
        if all(len(ids) == 1 for ids in found):
            [start], [gap], [end] = found
            opening = [*codec.beginning, start]
            return [*opening, *before, gap, *after, end], slice(len(opening), len(opening) + len(before))
    raise ApiError(
        400, "suffix is given, and the tokenizer has no marks of a gap, such as <|fim_prefix|>; leave it out", "suffix"
    )  # fmt: skip


def _encode_mark(codec: TextCodec, text: str) -> list[int]:
    try:
        return codec.vocabulary.encode_with_offsets(text)[0].tolist()
    except UsageError:  # a character that the vocabulary lacks
        return []
