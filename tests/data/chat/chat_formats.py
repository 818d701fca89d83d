"""The published forms of chat data: files, and the messages that each one means, written by hand.

`expected` has one entry per record: messages as transformers accepts them, tools, and how many of them are only
the prompt. `unlearned` are the indices of the replies that the file itself excludes.
"""

import dataclasses
import gzip
import json
from pathlib import Path

SYSTEM = {"role": "system", "content": "Be brief."}
ASKS = {"role": "user", "content": "What is 2 + 2?"}
SAYS = {"role": "assistant", "content": "It is 4."}
AGAIN = {"role": "user", "content": "And 3 + 3?\nIn one line."}
LAST = {"role": "assistant", "content": "It is 6, naïve café."}
TALK = [ASKS, SAYS, AGAIN, LAST]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
ARGUMENTS = {"city": "Köln", "days": 2}
CALLS = {"role": "user", "content": "How is the weather?"}


def call(arguments) -> dict:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefgh1", "type": "function",
                                                                 "function": function}]}  # fmt: skip


RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": '{"sky": "blue"}'}


@dataclasses.dataclass(frozen=True)
class Form:
    """A published form of chat data."""

    suffix: str
    records: list
    messages: list[list[dict]]
    tools: list | None = None
    prompts: int = 0  # messages of the prompt, for prompt and completion
    unlearned: tuple[int, ...] = ()

    def write(self, path: Path) -> Path:
        path = path.with_name(path.name + self.suffix)
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in self.records)
        if self.suffix == ".json":
            path.write_text(json.dumps(self.records, ensure_ascii=False, indent=1), "utf-8")
        elif self.suffix == ".jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        elif self.suffix == ".jsonl.zst":
            import zstandard

            path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
        elif self.suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(self.records), path)
        else:
            path.write_text(lines, "utf-8")
        return path


def turns(messages: list[dict]) -> list[dict]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in messages]


GREETING = {"role": "assistant", "content": "Hello!"}
ALPACA = [{"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"},
          {"instruction": "Say yes.", "input": "", "output": "yes"}]  # fmt: skip
FROM_ALPACA = [
    [{"role": "user", "content": "Add the numbers.\n2 and 2"}, {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}],
]
# The last prompt ends inside of a token of the joined text.
PROMPTS = [{"prompt": "What about 12 apples?", "completion": " The sky is blue, naïve café."},
           {"prompt": "Q: 😀\n\nA:", "completion": " “quotes” and\nmañana"},
           {"prompt": "the sk", "completion": "y is blue"}]  # fmt: skip
FORMS = {
    "openai lines": Form(".jsonl", [{"messages": TALK}], [TALK]),
    "openai array": Form(".json", [{"messages": TALK}, {"messages": TALK[:2]}], [TALK, TALK[:2]]),
    "openai tools": Form(
        ".jsonl",
        [{"messages": [CALLS, call(json.dumps(ARGUMENTS)), RESULT, LAST], "tools": [WEATHER]}],
        [[CALLS, call(ARGUMENTS), RESULT, LAST]],
        tools=[WEATHER],
    ),
    "openai weights": Form(".jsonl", [{"messages": [ASKS, SAYS | {"weight": 0}, AGAIN, LAST | {"weight": 1}]}], [TALK],
                           unlearned=(1,)),
    "openai developer": Form(".jsonl", [{"messages": [{**SYSTEM, "role": "developer"}, *TALK]}], [[SYSTEM, *TALK]]),
    "sharegpt lines": Form(".jsonl", [{"conversations": turns([SYSTEM, *TALK])}], [[SYSTEM, *TALK]]),
    "sharegpt array": Form(".json", [{"id": "1", "conversations": turns(TALK)}], [TALK]),
    "sharegpt gpt first": Form(".json", [{"conversations": turns([GREETING, *TALK])}], [TALK]),
    "alpaca array": Form(".json", ALPACA, FROM_ALPACA),
    "alpaca lines": Form(".jsonl", ALPACA, FROM_ALPACA),
    "trl messages": Form(".jsonl", [{"prompt": TALK[:3], "completion": TALK[3:]}], [TALK], prompts=3),
    "gzip": Form(".jsonl.gz", [{"messages": TALK}], [TALK]),
    "zstandard": Form(".jsonl.zst", [{"messages": TALK}], [TALK]),
    "parquet": Form(".parquet", [{"messages": TALK}], [TALK]),
    "trl text": Form(".jsonl", PROMPTS, []),
    "trl text array": Form(".json", PROMPTS, []),
}  # fmt: skip
TEMPLATES = ("qwen2_5", "qwen3", "gemma2", "phi3_5", "lfm2_5")
