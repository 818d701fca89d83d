"""Records what transformers and TRL make of the published forms of chat data.

    pip install transformers trl datasets; python -m tests.data.chat.record_formats

It writes formats.json: for each template and form the checksums of the ids that `apply_chat_template` gives, and the
spans of tokens that the rows of a real `SFTTrainer` learn. A form without messages has text: its ids are TRL's.
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
    if not form.messages:
        rows = make_rows(tokenizer, form.records, only_replies=False)
        return [_describe(row) | _describe_apart(tokenizer, row) for row in rows]
    return [_record(tokenizer, training, form, n) for n in range(len(form.messages))]


def _record(tokenizer, training: str | None, form: Form, number: int) -> dict:
    messages = form.messages[number]
    try:
        ids = _encode(tokenizer, messages, form.tools)
    except Exception as error:
        return {"rejected": f"{error!s:.80}"}
    text = tokenizer.apply_chat_template(messages, tools=form.tools, tokenize=False)
    if any(name["function"]["name"] not in text.partition("How is")[2]
           for message in messages for name in message.get("tool_calls", ())):  # fmt: skip
        return {"rejected": "leaves out the tool call"}
    found: dict = {"ids": checksum(ids), "tokens": len(ids)}
    record = {"messages": messages} | ({"tools": form.tools} if form.tools else {})
    try:
        [row] = make_rows(tokenizer, [form.records[number] if form.prompts else record], not form.prompts)
    except ValueError:  # SFTTrainer knows no template with {% generation %} for this one: name its own, as a user does
        published, tokenizer.chat_template = tokenizer.chat_template, training
        [row] = make_rows(tokenizer, [record], only_replies=True)
        tokenizer.chat_template = published
    return found | {"trl": _describe(row)["trl"] if row["input_ids"] == ids else "other tokens"}


def _describe(row: dict) -> dict:
    ids = row["input_ids"]
    return {"ids": checksum(ids), "tokens": len(ids), "trl": find_spans([label != -100 for label in row["labels"]])}


def _describe_apart(tokenizer, row: dict) -> dict:
    """Describes a prompt and a completion that are encoded by themselves, as for generation."""
    prompt, completion = (tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
    return {"prompt": len(prompt), "apart": checksum(prompt + completion), "end": completion[-1]}


def _encode(tokenizer, messages, tools) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, tokenize=True)["input_ids"]


def make_rows(tokenizer, records: list[dict], only_replies: bool) -> list[dict]:
    """Returns the rows of a real SFTTrainer: input_ids, and labels that are -100 where a token is not learned."""
    import datasets
    import transformers
    import trl

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **size))
    with tempfile.TemporaryDirectory() as out:
        settings = trl.SFTConfig(out, assistant_only_loss=only_replies, max_length=None, report_to=[], use_cpu=True,
                                 bf16=False)  # fmt: skip
        data = datasets.Dataset.from_list(records)
        trainer = trl.SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer)
    return list(trainer.train_dataset)


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
