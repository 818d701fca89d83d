"""Calls between tags, as the published templates of Qwen3-Coder, GLM-4.5 and DeepSeek V3 write them."""

import json
import time

import pytest

from shardformer.inference.tool_calls.json_calls import Call
from shardformer.inference.tool_calls.tagged_calls import BAR, read_values
from shardformer.inference.tool_calls.tool_formats import FORMATS
from tests.inference.tool_calls.test_tool_formats import split

CODER = """<tool_call>
<function=weather>
<parameter=city>
Köln </parameter> 😀
its "center"
</parameter>
<parameter=days>
2
</parameter>
<parameter=near>
[1.5, null, true]
</parameter>
<parameter=soon>
True
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Köln </arg_value> 😀
its "center"</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
<arg_key>near</arg_key>
<arg_value>[1.5, null, true]</arg_value>
<arg_key>soon</arg_key>
<arg_value>true</arg_value>
</tool_call>"""
JSON = '{"city": "Köln <|tool▁calls▁end|> 😀\\nits \\"center\\"", "days": 2, "near": [1.5, null, true], "soon": true}'
DEEPSEEK = f"""<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>weather
```json
{JSON}
```<|tool▁call▁end|>
<|tool▁call▁begin|>function<|tool▁sep|>clock
```json
{{}}
```<|tool▁call▁end|><|tool▁calls▁end|>"""
DEEPSEEK_31 = (
    f"<|tool▁calls▁begin|><|tool▁call▁begin|>weather<|tool▁sep|>{JSON}<|tool▁call▁end|>"
    "<|tool▁call▁begin|>clock<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|>"
)
CASES = [("qwen_coder", CODER, "</parameter>"), ("glm", GLM, "</arg_value>"), ("deepseek", DEEPSEEK, ""),
         ("deepseek", DEEPSEEK_31, "")]  # fmt: skip


@pytest.mark.parametrize("step", [None, 1, 7])
@pytest.mark.parametrize(("name", "text", "tag"), CASES)
def test_arguments_are_read_back(name, text, tag, step):
    if name == "deepseek":
        text, tag = text.replace("|", BAR), f"<{BAR}tool▁calls▁end{BAR}>"
    content, calls = split(FORMATS[name], f"well\n{text}", step)
    city = f'Köln {tag} 😀\nits "center"'
    assert calls[0] == ("weather", {"city": city, "days": 2, "near": [1.5, None, True], "soon": True})
    assert [name for name, _ in calls[1:]] == ["clock"] * (name == "deepseek")
    assert content == "well"


@pytest.mark.parametrize("ending", ["", "</function>", "</function>x"])
def test_spaces_of_a_call_take_linear_time(ending):
    text = "<tool_call>\n<function=clock>" + "\n" * 40_000 + f"{ending}</tool_call>"
    start = time.process_time()
    content, calls = split(FORMATS["qwen_coder"], text)
    assert time.process_time() - start < 2  # about 0.01; 10 or more in quadratic time
    assert (content, calls) == (("", [("clock", {})]) if ending == "</function>" else (text, []))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"enum": ["5", 6]}, "6", 6),
        ({"type": "boolean"}, "False", False),
        ({"type": "string"}, "True", "True"),
        ({"const": "5"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
        ({"$ref": "#/$defs/a~1b"}, "5", "5"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "https://example.org/string"}, "5", "5"),
        ({"pattern": "[0-9]+"}, "5", "5"),
        ({"description": "an id"}, "5", "5"),
        ({"items": {}}, "[5]", [5]),
        (None, '{"a": 1}', {"a": 1}),
        (True, "a b", "a b"),
    ],
)
def test_text_is_read_by_its_schema(schema, text, value):
    call = Call("f", json.dumps({"a": text}))
    parts = {"a/b": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]}}
    whole = {"$defs": parts, "properties": {"a": schema}}
    assert json.loads(read_values(call, None if schema is None else whole).arguments) == {"a": value}
    assert json.loads(read_values(call, {"$defs": parts, "additionalProperties": schema}).arguments) == {"a": value}


def test_references_are_followed_once():
    parts = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)} | {"60": {"type": "string"}}
    schema = {"$defs": parts, "properties": {"a": {"$ref": "#/$defs/0"}}}
    assert json.loads(read_values(Call("f", '{"a": "5"}'), schema).arguments) == {"a": "5"}


@pytest.mark.parametrize("text", ["NaN", "1e999", "[" * 100_000, "-Infinity"])
def test_hostile_values_are_no_call(text):
    """They are no JSON, or would be none in the answer."""
    whole = f"<tool_call>weather<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    content, calls = split(FORMATS["glm"], whole)
    assert (content, calls) in ((whole, []), ("", [("weather", {"a": text})]))
