"""Records what transformers and TRL make of the published forms of chat data.

    pip install transformers trl; python -m tests.data.chat.record_formats

It writes formats.json: for each template and form the checksums of the ids, and the spans of tokens that TRL learns.
"""

import json
import tempfile
import zlib
from pathlib import Path

from tests.data.chat import families
from tests.data.chat.chat_formats import FORMS, TEMPLATES, Form
from tests.data.chat.record_chats import _fixed_clock

GOLDENS = Path(__file__).with_name("formats.json")
TRAINING = {"gemma2": "gemma"}  # the names of TRL's files that differ from ours


def checksum(ids) -> str:
    return f"{zlib.crc32(json.dumps(list(map(int, ids))).encode()):08x}"


def find_spans(mask) -> list[list[int]]:
    """Returns [start, end) of each run of ones."""
    padded = [0, *map(int, mask), 0]
    starts = [n for n in range(len(padded) - 1) if padded[n : n + 2] == [0, 1]]
    ends = [n for n in range(len(padded) - 1) if padded[n : n + 2] == [1, 0]]
    return [list(pair) for pair in zip(starts, ends, strict=True)]


def record_form(tokenizer, training: str | None, form: Form) -> list[dict]:
    return [_record(tokenizer, training, form, messages) for messages in form.messages]


def _record(tokenizer, training: str | None, form: Form, messages: list[dict]) -> dict:
    try:
        ids = _encode(tokenizer, messages, form.tools)["input_ids"]
    except Exception as error:
        return {"rejected": f"{error!s:.80}"}
    text = tokenizer.apply_chat_template(messages, tools=form.tools, tokenize=False)
    if any(name["function"]["name"] not in text.partition("How is")[2]
           for message in messages for name in message.get("tool_calls", ())):  # fmt: skip
        return {"rejected": "leaves out the tool call"}
    found: dict = {"ids": checksum(ids), "tokens": len(ids)}
    if form.prompts:  # as in SFTTrainer: the loss covers all tokens after the prompt and its header
        prompt = _encode(tokenizer, messages[: form.prompts], form.tools, add_generation_prompt=True)["input_ids"]
        return found | {"trl": find_spans([n >= len(prompt) for n in range(len(ids))])}
    theirs = _encode(tokenizer, messages, form.tools, chat_template=training, return_assistant_tokens_mask=True)
    if theirs["input_ids"] != ids:
        return found | {"trl": "other tokens"}
    return found | {"trl": find_spans(theirs["assistant_masks"])}


def _encode(tokenizer, messages, tools, **options):
    return tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, tokenize=True, **options)


def read_training_template(name: str) -> str | None:
    """Returns TRL's template of a family; None for one that marks replies itself."""
    import trl

    path = Path(trl.__file__).parent / "chat_templates" / f"{TRAINING.get(name, name)}_training.jinja"
    return path.read_text("utf-8") if path.is_file() else None


def main() -> None:
    import transformers

    found = {}
    with tempfile.TemporaryDirectory() as folder, _fixed_clock():
        for name in TEMPLATES:
            tokenizer = transformers.AutoTokenizer.from_pretrained(families.write_tokenizer(name, Path(folder) / name))
            training = read_training_template(name)
            found[name] = {form: record_form(tokenizer, training, FORMS[form]) for form in FORMS}
    GOLDENS.write_text("{\n" + ",\n".join(map(write_template_lines, found, found.values())) + "\n}\n")


def write_template_lines(name: str, forms: dict[str, list[dict]]) -> str:
    """Returns a line of JSON for each form, for readable diffs."""
    lines = [f" {json.dumps(form)}: {json.dumps(records)}" for form, records in forms.items()]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    main()
