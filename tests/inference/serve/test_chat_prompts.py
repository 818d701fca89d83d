"""The prompt of a chat request is what transformers makes of it with a published template."""

import asyncio
import datetime
import json

import pytest

pytest.importorskip("starlette")

from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.serve.engine import Engine
from shardformer.inference.serve.engine_thread import EngineThread
from shardformer.inference.serve.jobs import Weights
from shardformer.inference.serve.server_metrics import ServerMetrics
from shardformer.inference.serve.service import Served, Service
from shardformer.inference.text_codec import TextCodec
from tests.data.chat import families
from tests.data.chat.record_chats import checksum
from tests.data.chat.test_chat_families import open_family
from tests.inference import test_generator

COUNT = 4  # conversations of each family, some with tools
# Checksums of transformers 5.24's prompts, which `test_prompts_equal_those_of_transformers` compares.
RECORDED = {
    "qwen3": "b49829ea986f11fb64126139a45df98a",
    "mistral_nemo": "c70d89b6d6d2b953f9eba387cbc482ca",
}


def conversations(name) -> list[dict]:
    """Returns records that end before a reply; every second one has tools, if the template knows them."""
    by_tools = {}
    for record in families.make_records(name)[:40]:
        messages = record["messages"]
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        by_tools.setdefault("tools" in record, []).append(record | {"messages": messages})
    plain, with_tools = by_tools[False], by_tools.get(True, [])
    return [*with_tools[: COUNT // 2], *plain][:COUNT]


def as_client(record) -> dict:
    """Returns the request of a client, which writes the arguments of tool calls as text."""
    record = json.loads(json.dumps(record))
    for call in (call for message in record["messages"] for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return record | {"max_tokens": 1}


def open_service(name, folder) -> tuple[Service, list[list[int]]]:
    """Returns a service with the template of a family, and a list that collects the ids that its jobs would read."""
    vocabulary, format = open_family(name, folder)
    codec, prompts = TextCodec(vocabulary), []
    thread = EngineThread(Engine(test_generator.model(vocab=1000, seq=8192), 2), ServerMetrics(), 99)

    def submit(jobs, ended):
        prompts.extend(job.prompt for job in jobs)

    thread.submit = submit
    chat = ChatCodec(vocabulary, format, sorted(codec.ends))
    return Service(thread, [Served("m", Weights(None))], codec, chat), prompts


def read_prompts(name, folder) -> list[list[int]]:
    service, prompts = open_service(name, folder)
    for record in conversations(name):
        asyncio.run(service.start(json.dumps(as_client(record)).encode(), chat=True))
    return prompts


def ask_transformers(name, folder) -> list[list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(families.write_tokenizer(name, folder))
    options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    return [
        tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), **options)["input_ids"]
        for record in conversations(name)
    ]


def checksums(prompts) -> str:
    return "".join(checksum(prompt, []) for prompt in prompts)


@pytest.mark.parametrize("name", RECORDED)
def test_prompts_are_those_of_transformers(name, tmp_path):
    prompts = read_prompts(name, tmp_path)
    assert checksums(prompts) == RECORDED[name]
    assert checksums([prompts[0][:-1], *prompts[1:]]) != RECORDED[name]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_prompts_equal_those_of_transformers(name, tmp_path):
    pytest.importorskip("transformers")
    today = datetime.date.today()
    expected, found = ask_transformers(name, tmp_path / "theirs"), read_prompts(name, tmp_path / "ours")
    assert found == expected or today != datetime.date.today()  # some templates have the date
    assert name not in RECORDED or checksums(expected) == RECORDED[name]


def test_template_process_is_kept_and_replaced_when_it_ends(tmp_path):
    service, prompts = open_service("qwen3", tmp_path)
    body = json.dumps(as_client(conversations("qwen3")[2])).encode()
    asyncio.run(service.start(body, chat=True))
    (process,) = service.prompts._processes
    asyncio.run(service.start(body, chat=True))
    assert service.prompts._processes == [process]
    process._process.kill()
    process._process.wait()
    asyncio.run(service.start(body, chat=True))
    assert service.prompts._processes != [process]
    assert prompts == prompts[:1] * 3
    (process,) = service.prompts._processes
    service.close()
    assert not process.is_alive
