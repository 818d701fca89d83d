"""The tokenizer of a run under the keys of GGUF: byte-level BPE, and BPE of SentencePiece's pieces (Llama 2, Gemma)."""

import json
from typing import Any

from shardformer.convert.hf_special_tokens import find_end_of_turn, name_ids
from shardformer.data.hf_tokenizer import HfTokenizer
from shardformer.data.vocabulary import Bytes
from shardformer.errors import UsageError
from shardformer.training.run_folder import Run

NONE = {"tokenizer.ggml.model": "no_vocab"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = "llama-bpe"  # for which llama.cpp sets ignore_merges: a word that is a token needs no merges
# How a text is split into words -> llama.cpp's name for it.
PRE_TOKENIZERS = {
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": LLAMA3,
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}
GPT2, DIGITS = "gpt-2", "starcoder"  # ByteLevel's own splitting, and that with single digits
PIECES = "default"  # the name for pieces, which are not split into words
# Steps that llama.cpp does too, or that leave most texts as they are: NFC, which it lacks.
NFC = {"type": "NFC"}
PREPEND_SPACE = {"type": "Prepend", "prepend": "\u2581"}
MARK_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
WITHOUT = "give tokenizer=false to write the model without it"


def list_keys(run: Run) -> dict[str, Any]:
    """Returns the keys of a run's tokenizer, its special tokens and its chat template."""
    vocabulary = run.vocabulary
    if isinstance(vocabulary, Bytes):
        keys = _list_byte_keys(run.config.model.vocab)
    elif isinstance(vocabulary, HfTokenizer):
        keys = _list_bpe_keys(vocabulary, run.config.model.vocab)
    else:
        return dict(NONE)
    special = name_ids(run.special_tokens, vocabulary)
    end = special["eos_token_id"]
    ends = end if isinstance(end, list) else [end]
    turn = find_end_of_turn(run)
    ids = {"bos": special["bos_token_id"], "eos": ends[0], "padding": special["pad_token_id"]}
    ids["eot"] = turn if turn is not None else (*ends[1:], None)[0]
    keys |= {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    begins = vocabulary.beginning or vocabulary.template
    if len(begins) > 1:
        raise UsageError(
            f"tokenizer={vocabulary.name} puts {len(begins)} tokens before a text, and GGUF has 1; {WITHOUT}"
        )
    keys["tokenizer.ggml.add_bos_token"] = bool(begins)
    keys |= {"tokenizer.ggml.bos_token_id": begins[0]} if begins else {}
    if vocabulary.chat:
        keys["tokenizer.chat_template"] = vocabulary.chat.template
    return keys


def _list_byte_keys(size: int) -> dict[str, Any]:
    """A byte-level BPE without merges; its letters are GPT-2's."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    return _list_tokens([*letters, "<|endoftext|>"], [NORMAL] * 256 + [CONTROL], size) | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": GPT2, "tokenizer.ggml.merges": [],
    }  # fmt: skip


def _list_tokens(tokens: list[str], kinds: list[int], size: int) -> dict[str, Any]:
    """Returns the list of tokens, filled up to the size of the model's table."""
    unused = range(len(tokens), size)
    return {
        "tokenizer.ggml.tokens": tokens + [f"[PAD{number}]" for number in unused],
        "tokenizer.ggml.token_type": kinds + [UNUSED for _ in unused],
    }


def _list_bpe_keys(vocabulary: HfTokenizer, size: int) -> dict[str, Any]:
    document = json.loads(vocabulary.text)
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UsageError(
            f"tokenizer={vocabulary.name} is a {model.get('type')!r:.40} model, and only BPE is written; {WITHOUT}"
        )
    added = {token["id"]: token for token in document.get("added_tokens") or []}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: token["content"] for number, token in added.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(max(by_id) + 1)]
    kinds = [UNUSED if number not in by_id else NORMAL for number in range(len(tokens))]
    for number, token in added.items():
        kinds[number] = CONTROL if token.get("special") else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        _check_settings(vocabulary.name, document, PIECES, [PREPEND_SPACE, MARK_SPACES])
        return _list_pieces(document, tokens, kinds, merges, size)
    pre_tokenizer = _find_pre_tokenizer(vocabulary.name, document.get("pre_tokenizer") or {})
    _check_settings(vocabulary.name, document, pre_tokenizer, [NFC])
    return _list_tokens(tokens, kinds, size) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.merges": merges,
    }


def _check_settings(name: str, document: dict, pre_tokenizer: str, normalizers: list[dict]) -> None:
    """Rejects settings that change a text or its tokens in a way that llama.cpp does not."""
    for step in _list_steps(document.get("normalizer")):
        if step not in normalizers:
            raise UsageError(
                f"tokenizer={name} normalises a text by {json.dumps(step)!s:.300}, which llama.cpp does not; {WITHOUT}"
            )
    model = document["model"]
    settings = ["continuing_subword_prefix", "end_of_word_suffix"]
    settings += [] if pre_tokenizer == LLAMA3 else ["ignore_merges"]
    for setting in settings:
        if model.get(setting):
            raise UsageError(
                f"tokenizer={name} has {setting}={model[setting]!r:.40}, which llama.cpp lacks for "
                f"pre={pre_tokenizer}; {WITHOUT}"
            )


def _list_steps(normalizer: dict | None) -> list[dict]:
    """Returns the steps that change a text before it is split, those of sequences one by one."""
    if normalizer and normalizer.get("type") == "Sequence":
        return [step for inner in normalizer["normalizers"] for step in _list_steps(inner)]
    return [normalizer] if normalizer else []


def _find_pre_tokenizer(name: str, settings: dict) -> str:
    """Returns llama.cpp's name of how a text is split into words."""
    steps = settings.get("pretokenizers", [settings])
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return GPT2
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and last.get("use_regex", True):
            return DIGITS
        pattern = steps[0].get("pattern", {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
        if pattern in PRE_TOKENIZERS and steps[0].get("behavior") == "Isolated" and not last.get("use_regex", True):
            return PRE_TOKENIZERS[pattern]
    raise UsageError(
        f"tokenizer={name} splits a text by {json.dumps(settings)!s:.300}, for which no name of llama.cpp's is known "
        f"here; {WITHOUT}"
    )


def _list_pieces(document: dict, tokens: list[str], kinds: list[int], merges: list[str], size: int) -> dict[str, Any]:
    """The keys of SentencePiece's BPE: a token that is merged earlier has a higher score, and one of no merge the last.

    llama.cpp forms every token of two that are next to each other, the one with the highest score first.
    """
    ids = {token: number for number, token in enumerate(tokens)}
    scores = [-float(len(merges) + 1)] * max(size, len(tokens))
    for rank, merge in reversed(list(enumerate(merges))):
        scores[ids[merge.replace(" ", "")]] = -float(rank + 1)
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[number] = BYTE
    unknown = document["model"].get("unk_token")
    keys: dict[str, Any] = {}
    if unknown in ids:
        kinds[ids[unknown]] = UNKNOWN
        keys["tokenizer.ggml.unknown_token_id"] = ids[unknown]
    schemes = ('"prepend_scheme": "first"', '"prepend_scheme": "always"')
    splits = json.dumps(document.get("pre_tokenizer"))
    has_prefix = PREPEND_SPACE in _list_steps(document.get("normalizer")) or any(one in splits for one in schemes)
    return keys | _list_tokens(tokens, kinds, size) | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": PIECES,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }  # fmt: skip
