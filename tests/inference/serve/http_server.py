"""A server of a small model in a thread of this process, and requests to it."""

import contextlib
import http.client
import json
import socket
import threading

import uvicorn

from shardformer.data.chat.chat_format import make_builtin
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.serve.app import make_app
from shardformer.inference.serve.bodies import Limits
from shardformer.inference.serve.connections import make_config
from shardformer.inference.serve.engine import Engine
from shardformer.inference.serve.engine_thread import EngineThread
from shardformer.inference.serve.server_metrics import ServerMetrics
from shardformer.inference.serve.service import Served, Service
from shardformer.inference.text_codec import TextCodec
from tests.data.chat.chatml_bytes import make_vocabulary
from tests.inference import test_generator
from tests.surroundings import before_call
from tests.waiting import PATIENCE, wait_for

SIZES = {"seq": 96, "vocab": 260}
SLOTS, QUEUE = 4, 8
HOURS = 10_000.0  # seconds, longer than any thread is stopped


def make_service() -> Service:
    engine = Engine(test_generator.model(**SIZES), SLOTS, len(make_vocabulary()))
    weights = engine.load(test_generator.parameters(**SIZES), "step 7")
    thread = EngineThread(engine, ServerMetrics(), QUEUE)
    chat = ChatCodec(make_vocabulary(), make_builtin("chatml"))
    limits = Limits(seconds=HOURS, header_seconds=HOURS, body_seconds=HOURS)
    return Service(thread, [Served("small", weights)], TextCodec(make_vocabulary()), chat, limits=limits)


@contextlib.contextmanager
def running(service: Service):
    """Serves on a free port; yields it."""
    service.thread.start()
    with running_app(make_app(service), service.limits) as port:
        yield port
    service.close()


@contextlib.contextmanager
def running_app(app, limits: Limits):
    """Serves an ASGI application on a free port; yields it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # uvicorn would close a connection without a byte after 5 s, whatever the limits are.
        server = uvicorn.Server(make_config(app, limits, timeout_graceful_shutdown=1, timeout_keep_alive=int(HOURS)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(PATIENCE)


def send(port: int, path: str, body=None, headers=None, method="") -> tuple[int, bytes]:
    """Sends a request; a body of a dict is JSON. Returns the status and the content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10 * PATIENCE)
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"Content-Type": "application/json"} | (headers or {})
    with contextlib.closing(connection):
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        response = connection.getresponse()
        return response.status, response.read()


def ask(port: int, body: dict, path="/v1/completions") -> dict:
    status, content = send(port, path, body)
    assert status == 200, content
    return json.loads(content)


def read_events(port: int, body: dict, path="/v1/completions") -> list[dict]:
    status, content = send(port, path, body | {"stream": True})
    assert status == 200, content
    *events, last = [part.removeprefix("data: ") for part in content.decode().split("\n\n")[:-1]]
    assert last == "[DONE]"
    return list(map(json.loads, events))


def hold_back(service, monkeypatch, condition) -> None:
    """Lets each step of the engine wait for a condition; `condition(engine)` is asked again until it holds."""
    engine = service.thread.engine
    before_call(monkeypatch, engine, "step", lambda *_, **__: wait_for(lambda: condition(engine)))


def all_running_are_cancelled(engine) -> bool:
    return all(job.cancelled for job in engine.running)
