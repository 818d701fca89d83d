"""Connections that never finish a request are closed, so that others are answered."""

import contextlib
import socket
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.inference.serve import connections
from shardformer.inference.serve.bodies import Limits
from tests.inference.serve.conftest import DRAWN
from tests.inference.serve.http_server import ask, hold_back, running_app, send
from tests.inference.serve.test_bodies import HEAD, is_open
from tests.waiting import PATIENCE, wait_for


def connect(stack, port, sent=b"GET /health HTTP/1.1\r\nHost: localhost\r\n") -> socket.socket:
    """Connects and sends a part of a request."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
    client.sendall(sent)
    return client


def send_slowly(client, part: bytes) -> None:
    for _ in range(600):
        client.sendall(part)
        time.sleep(0.1)


def is_closed(client) -> bool:
    try:
        return not client.recv(1000)
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /"])
def test_late_headers_close_the_connection(service, port, monkeypatch, sent):
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(service.limits, "header_seconds", 0.2)
        client = connect(stack, port, sent)
        while not is_closed(client):
            pass
    assert send(port, "/health")[0] == 200


def test_slowly_sent_headers_do_not_extend_their_time(service, port, monkeypatch):
    monkeypatch.setattr(service.limits, "header_seconds", 0.5)
    with contextlib.ExitStack() as stack:
        client = connect(stack, port)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_slowly(client, b"X: y\r\n")


def test_body_that_nobody_reads_has_its_time(service, port, monkeypatch):
    """An endpoint that rejects a request does not read its body."""
    monkeypatch.setattr(service.limits, "body_seconds", 0.2)
    monkeypatch.setattr(connections, "SPARE_SECONDS", 0.0)
    with contextlib.ExitStack() as stack:
        client = connect(stack, port, (HEAD % 1000).replace(b"/v1/completions", b"/nowhere"))
        assert b" 404 " in client.recv(1000)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_slowly(client, b"x")


def test_oldest_waiting_connections_are_closed(service, port, monkeypatch, capfd):
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(service.limits, "connections", 8)
        clients = [connect(stack, port) for _ in range(30)]
        assert ask(port, DRAWN)
        assert all(map(is_closed, clients[:22]))
        assert all(map(is_open, clients[-5:]))
    assert capfd.readouterr().err.count("more than 8 connections are open") == 1


def test_running_requests_are_not_closed_for_others(service, port, monkeypatch):
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(service.limits, "connections", 1)
        body = b'{"prompt": "a", "max_tokens": 10, "ignore_eos": true}'
        closed = []
        hold_back(service, patch, lambda engine: closed or not engine.running)
        client = connect(stack, port, HEAD % len(body) + body)
        wait_for(lambda: service.thread.engine.running)
        closed.append(is_closed(connect(stack, port)))
        assert closed == [True]
        assert b" 200 " in client.recv(100)


async def send_much(scope, receive, send) -> None:
    """Is an application whose answer no buffer of the system holds."""
    if scope["type"] != "http":
        raise NotImplementedError  # no lifespan
    await send({"type": "http.response.start", "status": 200, "headers": []})
    with contextlib.suppress(OSError):
        for _ in range(200):
            await send({"type": "http.response.body", "body": bytes(1_000_000), "more_body": True})


def test_client_that_does_not_read_is_closed_for_others():
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with running_app(send_much, Limits(connections=1)) as own_port, contextlib.ExitStack() as stack:
        connect(stack, own_port, request)

        def is_answered() -> bool:
            with contextlib.suppress(ConnectionResetError):  # the client is closed until the buffers are full
                return connect(stack, own_port, request).recv(12) == b"HTTP/1.1 200"
            return False

        wait_for(is_answered)


def test_upgrade_is_answered_without_advice(port, caplog):
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert send(port, "/health", headers=headers)[0] == 200
    assert not caplog.records
