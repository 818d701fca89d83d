"""The server's answers are those of `generate`, and a bad client harms no other."""

import concurrent.futures
import dataclasses
import json
import socket
import threading

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.scoring import Request, Scorer
from shardformer.inference.serve import json_responses
from shardformer.inference.serve.answers import Choice
from shardformer.inference.serve.app import PAGE
from tests.data.chat.chatml_bytes import make_vocabulary
from tests.inference import test_generator
from tests.inference.serve import browser
from tests.inference.serve.conftest import DRAWN
from tests.inference.serve.http_server import (
    QUEUE,
    SIZES,
    SLOTS,
    all_running_are_cancelled,
    ask,
    hold_back,
    read_events,
    send,
)
from tests.surroundings import before_call
from tests.waiting import PATIENCE, wait_for

ENDLESS = DRAWN | {"max_tokens": 90, "ignore_eos": True, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3, "temperature": 3.0}


def test_completions_are_those_of_generate(service, port, generated):
    answer = ask(port, DRAWN | {"n": 3, "logprobs": 2})
    for choice, job in zip(answer["choices"], generated, strict=True):
        assert choice["text"] == job.stops.cut(job.ids)
        assert choice["logprobs"]["token_logprobs"] == job.logprobs
        assert choice["finish_reason"] == ("stop" if job.stopped else "length")
    drawn = sum(len(job.ids) for job in generated)
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": drawn, "total_tokens": 5 + drawn} | details
    assert ask(port, DRAWN | {"seed": 6})["choices"][0]["text"] != answer["choices"][0]["text"]


def test_answers_do_not_depend_on_other_requests(port, generated):
    bodies = [DRAWN | {"seed": 5 + i % 3, "max_tokens": 24 - i, "logprobs": 0} for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: ask(port, body)["choices"], bodies))
    assert together == [ask(port, body)["choices"] for body in bodies]
    assert together[0][0]["logprobs"]["token_logprobs"] == generated[0].logprobs


@pytest.mark.parametrize("seed", range(4))
def test_streams_join_to_the_text(port, seed):
    """Most characters are split over tokens, and the stop string over two."""
    body = DRAWN | {"seed": seed, "max_tokens": 80}
    free = ask(port, body)["choices"][0]["text"]
    body["stop"] = [free[len(free) // 2 :][:2], "never there"]
    whole = ask(port, body)["choices"][0]
    events = read_events(port, body | {"stream_options": {"include_usage": True}})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["text"] == free.partition(
        body["stop"][0])[0]  # fmt: skip
    assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] < 80


def test_echo_scores_the_prompt(port):
    ids = [10, 20, 30, 40]
    both = [ids, ids[:3]]
    answer = ask(port, {"prompt": both, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True})
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first["token_logprobs"][:3] == second["token_logprobs"][:3]
    assert first["token_logprobs"][0] is first["top_logprobs"][0] is None
    assert [len(part["tokens"]) for part in (first, second)] == [5, 4]
    scored = ask(port, {"prompt": ids, "max_tokens": 0, "logprobs": 1, "echo": True})["choices"][0]["logprobs"]
    assert scored["token_logprobs"] == first["token_logprobs"][:4]
    best = max(second["top_logprobs"][-1], key=second["top_logprobs"][-1].get)
    assert best == second["tokens"][-1]


def test_text_offsets_count_complete_characters(port):
    body = {"prompt": "é😀a", "max_tokens": 2, "temperature": 0, "logprobs": 1, "echo": True}
    (choice,) = ask(port, body)["choices"]
    assert choice["logprobs"]["text_offset"][:8] == [0, 0, 1, 1, 1, 1, 2, 3]  # each byte is a token
    parts = [event["choices"][0]["logprobs"] for event in read_events(port, body)]
    offsets = [offset for part in parts if part for offset in part["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"][7:]


def test_text_offsets_count_bytes_that_are_no_character(port):
    """The model writes random bytes."""
    (choice,) = ask(port, DRAWN | {"max_tokens": 60, "logprobs": 0, "echo": True})["choices"]
    found = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    spelled = [(token, offset) for token, offset in found if len(token) == 1]
    assert len(spelled) > 10
    assert all(choice["text"][offset] == token for token, offset in spelled)
    assert "\N{REPLACEMENT CHARACTER}" in choice["text"]


def test_scores_are_those_of_the_harness(port):
    """lm-eval's local-completions reads log-likelihoods from the echo of a prompt."""
    scorer = Scorer(test_generator.model(**SIZES), 2)
    requests = [Request([3, 1, 4], [1, 5, 9, 2, 6]), Request([5], [3, 5, 8])]
    expected = scorer.score(test_generator.parameters(**SIZES), requests)
    body = {"prompt": [[*ids, *targets] for ids, targets in requests], "max_tokens": 1, "temperature": 0}
    answer = ask(port, body | {"logprobs": 1, "echo": True})
    for choice, request, score in zip(answer["choices"], requests, expected, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(request.context) : -1]
        assert -sum(values) == pytest.approx(score.nats, rel=1e-6)
        assert -sum(values[1:]) != pytest.approx(score.nats, rel=1e-2)


def test_replies_follow_the_template(service, port):
    answer = ask(port, CHAT | {"logprobs": True, "top_logprobs": 2}, "/v1/chat/completions")
    (choice,) = answer["choices"]
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer["usage"]["prompt_tokens"] == len(service.codec.vocabulary.encode_with_offsets(prompt)[0])
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 12
    events = read_events(port, CHAT, "/v1/chat/completions")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == choice["message"]["content"]


BAD = [
    (b"{", 400, "not JSON"),
    (b"[]", 400, "a JSON list"),
    ({"prompt": "a", "max_tokens": 97}, 400, "context, 96"),
    ({"prompt": "a" * 9_000_000}, 400, "9,000,000 characters, too many for a context of 96"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature must be"),
    ({"prompt": "a", "top_p": "x"}, 400, "expected a number"),
    ({"prompt": {}}, 400, "expected text, token ids"),
    ({"prompt": [260]}, 400, "outside 0..257"),
    ({"prompt": "a", "n": 129}, 400, "1 to 128"),
    ({"prompt": "a", "best_of": 2}, 400, "best_of=2 differs"),
    ({"prompt": "a", "suffix": "x"}, 400, "no marks of a gap"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, 400, "expected a number from -100 to 100"),
    ({"prompt": "a", "logit_bias": {"258": 1}}, 400, "token id 258, outside 0..257"),
    ({"prompt": "a", "logit_bias": {"\ud800": 1}}, 400, "half of a character"),
    ({"prompt": "a", "logit_bias": [1]}, 400, "expected an object"),
    ({"prompt": "a", "presence_penalty": 2.1}, 400, "expected -2 to 2"),
    (b'{"prompt": "a", "frequency_penalty": NaN}', 400, "expected -2 to 2"),
    ({"prompt": "a", "tempreature": 1}, 400, "'tempreature' is not a field"),
    ({"prompt": "a", "stop": 3}, 400, "expected text or a list"),
    ({"prompt": "a", "model": "gpt"}, 404, "there is small"),
    ({"prompt": "a", "seed": 2**63}, 400, "seed must be"),
    ({"prompt": ["a", "b"], "n": 100}, 400, "more than 128"),
    ({"prompt": "a", "max_tokens": 10_000_001}, 400, "expected 0 to 10000000"),
    ({"prompt": "a", "max_tokens": 10**4000}, 400, "expected 0 to 10000000"),
    ({"prompt": "a", "stop": "\ud800"}, 400, "half of a character"),
    ({"prompt": "a", "stop": ["a", "b\udfff"]}, 400, "half of a character"),
    ({"prompt": "\ud800"}, 400, "half of a character"),
    ({"prompt": "a", "model": "\ud800"}, 404, "there is small"),
    ({"prompt": "a", "\ud800": 1}, 400, "not a field"),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD)
def test_bad_request_is_answered_as_openai_does(port, body, status, message):
    found, content = send(port, "/v1/completions", body)
    error = json.loads(content)["error"]
    assert (found, sorted(error)) == (status, ["code", "message", "param", "type"])
    assert message in error["message"]


@pytest.mark.parametrize(
    "messages", [None, [], "x", [{"role": "u"}], [{"role": "user", "content": 3}], [{"role": "user"}], [4]]
)
def test_bad_messages_are_rejected(port, messages):
    status, content = send(port, "/v1/chat/completions", CHAT | {"messages": messages})
    assert status == 400, content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_completion_tokens": 10_000_001}, "expected 0 to 10000000"),
        ({"max_tokens": 10_000_001}, "expected 0 to 10000000"),
        ({"stop": "\udc00"}, "half of a character"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "half of a character"),
        ({"chat_template_kwargs": {"\udc00": "\udc00"}}, None),
    ],
)
def test_bad_field_of_a_chat_is_named(port, fields, message):
    status, content = send(port, "/v1/chat/completions", CHAT | {"max_tokens": 4} | fields)
    assert status == (400 if message else 200)
    assert (message or "") in content.decode()


def test_fields_that_change_no_token_are_accepted(port):
    """Those of openai-python's own tests, with seeds of 64 bits."""
    same = {"best_of": 0, "suffix": "", "prompt_cache_key": "a", "safety_identifier": "b"}
    assert ask(port, DRAWN | same)["choices"] == ask(port, DRAWN)["choices"]
    same = {"prediction": {"type": "content", "content": "a"}, "audio": {"format": "wav", "voice": "alloy"},
            "modalities": ["text"], "verbosity": "medium", "reasoning_effort": "low", "web_search_options": {},
            "functions": [{"name": "f"}], "function_call": "none"}  # fmt: skip
    path = "/v1/chat/completions"
    assert ask(port, CHAT | same, path)["choices"] == ask(port, CHAT, path)["choices"]
    answer = ask(port, DRAWN | {"seed": -(2**53) + 1})
    assert answer["choices"] == ask(port, DRAWN | {"seed": answer["seed"]})["choices"]
    assert answer["choices"] != ask(port, DRAWN)["choices"]
    for name, value in (("modalities", ["audio"]), ("functions", [{}]), ("function_call", "auto"), ("suffix", "a")):
        status, content = send(port, path, CHAT | {name: value})
        assert (status, json.loads(content)["error"]["param"]) == (400, name)
    assert "give tools" in send(port, path, CHAT | {"functions": [{}]})[1].decode()


def test_no_tokens_are_an_empty_text(port):
    answer = ask(port, {"prompt": "to be", "max_tokens": 0})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [5, 0, 5]
    (event,) = read_events(port, {"prompt": "to be", "max_tokens": 0})
    assert event["choices"][0]["text"] == ""
    (choice,) = ask(port, CHAT | {"max_tokens": 0}, "/v1/chat/completions")["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_effort_is_a_variable_of_the_template(service, port, monkeypatch, name):
    template = f"{{{{ {name} }}}}" + service.chat.format.template
    monkeypatch.setattr(service, "chat", ChatCodec(make_vocabulary(), dataclasses.replace(
        service.chat.format, template=template)))  # fmt: skip
    monkeypatch.setattr(service.prompts, "_processes", [])
    counts = [ask(port, CHAT | more, "/v1/chat/completions")["usage"]["prompt_tokens"]
              for more in ({}, {name: "low"})]  # fmt: skip
    assert counts[1] == counts[0] + len("low")


@pytest.mark.parametrize("depth", [800, 960, 100_000])
def test_deep_bodies_are_no_defect(port, depth):
    """json reads most of these, and other code that walks them ends earlier; newer Pythons walk some of them."""
    deep = ["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth]
    bodies = [
        (f'{{"messages": [{{"role": "assistant", "content": null, "tool_calls": [{call}]}}], "max_tokens": 1}}')
        for each in deep
        for call in (f'{{"name": "f", "arguments": {each}}}', f'{{"name": "f", "arguments": {json.dumps(each)}}}')
    ]
    for body in bodies:
        status, content = send(port, "/v1/chat/completions", body.encode())
        assert status in ((400,) if depth > 1000 else (200, 400)), content


def test_unknown_path_is_json(port):
    status, content = send(port, "/v1/images", {})
    assert (status, json.loads(content)["error"]["code"]) == (404, "not_found")
    status, content = send(port, "/v1/completions")
    assert status == 405
    assert "GET /v1/completions is not answered; there are POST /v1/completions" in content.decode()


def test_requests_of_other_sites_are_rejected(port):
    """A browser sends text/plain to any site without asking it."""
    assert send(port, "/v1/completions", b"{}", {"Content-Type": "text/plain"})[0] == 400


def test_large_bodies_are_rejected(port, monkeypatch):
    monkeypatch.setattr(json_responses, "DISCARD_SECONDS", PATIENCE)  # the client may be stopped while it sends
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:  # declared, not sent
        client.sendall(request + b"Content-Length: 10000001\r\n\r\n")
        assert b" 413 " in client.recv(1000)
    with socket.create_connection(("127.0.0.1", port)) as client:  # sent, not declared
        client.sendall(request + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000000\r\n" + bytes(0x1000000))
        assert b" 413 " in client.recv(1000)
    assert send(port, "/v1/completions", bytes(11_000_000))[0] == 413  # declared and sent


def test_wrong_key_is_rejected(service, port, monkeypatch):
    monkeypatch.setattr(service, "api_key", "secret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        assert send(port, "/v1/models", headers=headers)[0] == 401
    assert send(port, "/v1/models", headers={"Authorization": "Bearer secret"})[0] == 200
    assert send(port, "/health")[0] == 200


def test_prompts_are_counted_before_they_are_encoded(service, port, monkeypatch):
    encoded = []
    with monkeypatch.context() as patch:
        before_call(patch, service.codec, "encode", lambda *arguments: encoded.append(arguments))
        before_call(patch, service.codec, "decode", lambda *arguments: encoded.append(arguments))
        for prompt in (["a"] * 300_000, [[1]] * 300_000, [1] * 300_000):
            assert send(port, "/v1/completions", {"prompt": prompt, "echo": True})[0] == 400
        assert not encoded
        assert send(port, "/v1/completions", {"prompt": ["a" * 97] * 100})[0] == 400
    assert len(encoded) == 1


def test_long_bodies_do_not_delay_short_ones(service, port, monkeypatch):
    encoding, answered, in_time = threading.Event(), threading.Event(), []
    with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor(4) as pool:

        def wait(prompt, _):
            if prompt == "long":
                encoding.set()
                in_time.append(answered.wait(PATIENCE))

        before_call(patch, service.codec, "encode", wait)
        body = DRAWN | {"prompt": "long", "user": "x" * 200_000}
        long = [pool.submit(send, port, "/v1/completions", body) for _ in range(4)]
        assert encoding.wait(PATIENCE)
        ask(port, DRAWN)
        answered.set()
        assert [future.result()[0] for future in long] == [200] * 4
    assert all(in_time)


def test_full_queue_rejects_and_then_serves(service, port, monkeypatch):
    with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor(30) as pool:
        rejected = service.metrics.rejected
        hold_back(service, patch, lambda _: service.metrics.rejected > rejected)
        body = DRAWN | {"max_tokens": 12}
        found = [status for status, _ in pool.map(lambda _: send(port, "/v1/completions", body), range(30))]
    assert set(found) == {200, 429}
    assert found.count(200) >= SLOTS + QUEUE
    assert service.thread.accepted == 0
    assert ask(port, DRAWN)


def test_client_that_goes_frees_its_row(service, port, monkeypatch):
    cancelled = service.metrics.cancelled
    with monkeypatch.context() as patch:
        hold_back(service, patch, all_running_are_cancelled)
        for stream in (True, False):
            body = json.dumps(ENDLESS | {"stream": stream}).encode()
            with socket.create_connection(("127.0.0.1", port)) as client:
                head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                wait_for(lambda: service.thread.engine.running)
            wait_for(lambda: not service.thread.accepted)  # counted after the row is free
            assert not service.thread.engine.running
    assert service.metrics.cancelled == cancelled + 4


def test_long_request_ends_at_its_time(service, port, monkeypatch):
    with monkeypatch.context() as patch:
        answers = []
        hold_back(service, patch, lambda _: len(answers) == 2)
        patch.setattr(service.limits, "seconds", 0.1)
        answers.append(send(port, "/v1/completions", DRAWN))
        answers.append(read_events(port, DRAWN))
    (status, content), events = answers
    assert (status, json.loads(content)["error"]["code"]) == (504, "timeout")
    assert events[-1]["error"]["code"] == "timeout"
    wait_for(lambda: not service.thread.accepted)


def test_stop_of_the_server_ends_its_requests(service, port, monkeypatch):
    with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor(2) as pool:
        hold_back(service, patch, all_running_are_cancelled)
        streamed = pool.submit(read_events, port, ENDLESS)
        answered = pool.submit(send, port, "/v1/completions", ENDLESS)
        wait_for(lambda: len(service.exchanges) == 2)
        next(iter(service.exchanges))._loop.call_soon_threadsafe(service.end_all)
        assert streamed.result()[-1]["error"]["code"] == "server_stops"
        assert answered.result()[0] == 503
    assert not service.exchanges
    wait_for(lambda: not service.thread.accepted)


def test_failed_step_fails_its_requests_only(service, port, monkeypatch, capsys):
    with monkeypatch.context() as patch:

        def fail(*_, **__):
            raise MemoryError("no memory")

        patch.setattr(service.thread.engine.programs, "draw", fail)
        status, content = send(port, "/v1/completions", DRAWN)
    assert (status, json.loads(content)["error"]["type"]) == (500, "server_error")
    assert ask(port, DRAWN)
    assert service.thread.accepted == 0


@pytest.mark.parametrize("body", [DRAWN | {"logprobs": 20}, CHAT | {"logprobs": True, "top_logprobs": 20}])
def test_entries_that_the_tokenizer_lacks_are_named(port, body):
    """The model has two more entries than the tokenizer, which are likely somewhere."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = body | {"seed": 0, "max_tokens": 60}
    assert "token_id:258" in json.dumps(ask(port, body, path))
    assert "token_id:258" in json.dumps(read_events(port, body, path))


def test_defect_is_answered_as_json(service, port, monkeypatch, capsys):
    def fail(*_):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Choice, "reason", property(fail))
    status, content = send(port, "/v1/completions", DRAWN)
    assert (status, json.loads(content)["error"]["type"]) == (500, "server_error")
    assert "a defect" in read_events(port, DRAWN)[-1]["error"]["message"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_metrics_count_requests_and_tokens(service, port):
    wait_for(lambda: not service.thread.accepted)  # those of a request that failed may still be drawn
    before = service.metrics.generated_tokens
    ask(port, ENDLESS)
    lines = send(port, "/metrics")[1].decode().splitlines()
    assert service.metrics.generated_tokens == before + 180
    assert f"shardformer_generated_tokens_total {before + 180}" in lines
    assert f"shardformer_slots {SLOTS}" in lines
    assert all(line.startswith(("# ", "shardformer_")) for line in lines)


def test_page_loads_nothing_else(port):
    status, content = send(port, "/")
    assert status == 200
    assert content == PAGE.read_bytes()
    assert not any(word in content for word in (b"http://", b"https://", b"src=", b"<link", b"import "))


@pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING)
def test_page_chats_in_a_browser(port):
    """A real browser sends a message, shows the reply's tokens, their probabilities, and an error; it logs nothing."""
    reply = ask(port, CHAT, "/v1/chat/completions")["choices"][0]["message"]["content"]
    with browser.open_browser() as window:
        window.open(f"http://127.0.0.1:{port}/")
        assert window.wait("[...document.getElementById('model').options].map(o => o.value)") == ["small"]
        fields = {"tokens": CHAT["max_tokens"], "seed": CHAT["seed"], "temperature": CHAT["temperature"], "text": "hi"}
        for name, value in fields.items():
            window.run(f"document.getElementById('{name}').value = '{value}'")
        window.run("document.getElementById('form').requestSubmit()")
        shown = window.wait("[...document.querySelectorAll('.assistant')].map(turn => turn.dataset.reply)[0]")
        assert shown == reply
        assert window.run("return document.querySelectorAll('.assistant .token').length") == CHAT["max_tokens"]
        window.run("document.querySelectorAll('.token')[2].dispatchEvent(new Event('mouseenter'))")
        rows = window.run("return [...document.querySelectorAll('#detail tr')].map(row => row.textContent)")
        assert len([row for row in rows if "%" in row]) >= 5
        assert window.run("return document.querySelector('#history .current').textContent") == "hi"
        assert not window.log()
        window.run("document.getElementById('tokens').value = 999; document.getElementById('text').value = 'x';"
                   "document.getElementById('form').requestSubmit()")  # fmt: skip
        assert "context, 96" in window.wait("(document.querySelector('.error') || {}).textContent")


def test_models_are_listed(port):
    (model,) = json.loads(send(port, "/v1/models")[1])["data"]
    assert (model["id"], model["checkpoint"], model["max_model_len"]) == ("small", "step 7", 96)
    assert json.loads(send(port, "/v1/models/small")[1]) == model
    assert send(port, "/v1/models/other")[0] == 404
