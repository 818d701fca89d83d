"""Published chat templates with small tokenizers of the same types, and random conversations that they accept."""

import dataclasses
import functools
import json
import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEMPLATES = Path(__file__).with_name("templates")
GOLDENS = Path(__file__).with_name("goldens.json")
COUNT = 1000  # conversations of each family
DATE = "2026-01-02"


@dataclasses.dataclass(frozen=True)
class Family:
    """A template with the tokens of its tokenizer; `assistant` matches the trained text, as a person would mark it."""

    markers: tuple[str, ...]
    assistant: str = ""  # none: transformers finds the {% generation %} blocks
    tokens: tuple[tuple[str, str], ...] = ()
    pieces: bool = False  # a tokenizer of SentencePiece's kind, else byte-level BPE
    system: bool = True
    tools: bool = True


IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
FAMILIES = {
    "qwen2_5": Family(IM, CHATML, (("eos_token", "<|im_end|>"),)),
    "qwen3": Family((*IM, "<think>", "</think>"), CHATML, (("eos_token", "<|im_end|>"),)),
    "gemma2": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        r"<start_of_turn>model\n(.*?<end_of_turn>)",
        (("bos_token", "<bos>"), ("eos_token", "<eos>")),
        pieces=True,
        system=False,
        tools=False,
    ),
    "phi3_5": Family(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        r"<\|assistant\|>\n(.*?<\|end\|>(?:\n<\|endoftext\|>\Z)?)",
        (("eos_token", "<|endoftext|>"),),
        pieces=True,
        tools=False,
    ),
    "mistral_nemo": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        r"\[/(?:INST|TOOL_RESULTS)\](.*?</s>)",
        (("bos_token", "<s>"), ("eos_token", "</s>")),
    ),
    "llama3_2": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
        (("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
    ),
    "lfm2_5": Family(("<|startoftext|>", *IM), "", (("bos_token", "<|startoftext|>"), ("eos_token", "<|im_end|>"))),
}

WORDS = (
    *("the", "sky", "is", "blue", "and", "what", "about", "12", "apples?", "naïve", "café", "“quotes”", "日本語"),
    *("😀", "👩\u200d👧", "Ω", "mañana"),
)
SPACES = (" ", " ", " ", "  ", "\n", "\n\n", "\t", " \n ")


def write_tokenizer(name: str, folder: Path) -> Path:
    """Writes the folder of a family's tokenizer, as transformers reads it."""
    family = FAMILIES[name]
    tokenizer = _load(family.pieces)
    tokenizer.add_special_tokens(list(family.markers))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text("utf-8"), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(family.tokens)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@functools.cache
def _train(pieces: bool) -> str:
    texts = [" ".join(make_text(random.Random(n)) for _ in range(5)) for n in range(40)]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if pieces:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [f"<0x{n:02X}>" for n in range(256)]
        tokenizer.model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *alphabet], show_progress=False)
        tokenizer.train_from_iterator(["the sky is blue and what about 12 apples?", *texts[:3]], trainer)
        learned = json.loads(tokenizer.to_str())
        learned["added_tokens"] = [token for token in learned["added_tokens"] if token["content"] == "<unk>"]
        return json.dumps(learned)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def _load(pieces: bool) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_train(pieces))


def make_text(draw: random.Random, longest: int = 12) -> str:
    """Returns random text of many scripts with any Unicode white space, or an empty string."""
    parts = [draw.choice(WORDS) + draw.choice(SPACES) for _ in range(draw.randrange(longest))]
    return draw.choice(("", "", "\n", " ")) + "".join(parts)


def make_records(name: str, count: int = COUNT) -> list[dict]:
    """Returns conversations that the template of a family accepts."""
    return [_make_record(name, random.Random(f"{name} {n}")) for n in range(count)]


def _make_record(name: str, draw: random.Random) -> dict:
    family = FAMILIES[name]
    messages = []
    if family.system and draw.random() < 0.4:
        messages.append({"role": "system", "content": make_text(draw)})
    with_tools = family.tools and draw.random() < 0.3
    for _ in range(draw.randint(1, 4)):
        longest = 3000 if draw.random() < 0.01 else 12
        messages.append({"role": "user", "content": make_text(draw, longest)})
        if with_tools and draw.random() < 0.6:
            messages += _call_tool(draw)
        messages.append({"role": "assistant", "content": make_text(draw, longest)})
    if draw.random() < 0.1:
        messages.append({"role": "user", "content": make_text(draw)})
    return {"messages": messages} | ({"tools": [TOOL]} if with_tools else {})


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look: “out” 😀",
        "parameters": {"type": "object", "properties": {}},
    },
}


def _call_tool(draw: random.Random) -> list[dict]:
    number = "".join(draw.choice("abcdefgh1234") for _ in range(9))
    call = {
        "id": number,
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": make_text(draw, 3)}},
    }
    content = "" if draw.random() < 0.5 else "let me see"
    return [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": number, "content": make_text(draw, 5)},
    ]
