"""Bodies that arrive slowly delay no other request and need bounded memory."""

import contextlib
import socket

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.inference.serve import connections
from tests.inference.serve.conftest import DRAWN
from tests.inference.serve.http_server import ask, send
from tests.waiting import PATIENCE, wait_for

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def send_part(stack, port, length=100_000, sent=b"{") -> socket.socket:
    """Sends a part of a body of `length` bytes."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
    client.sendall(HEAD % length + sent)
    return client


def is_open(client) -> bool:
    """Returns whether the server has neither answered nor closed the connection."""
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) is None
    except BlockingIOError:
        return True
    finally:
        client.settimeout(PATIENCE)


def test_slow_bodies_do_not_delay_others(service, port):
    with contextlib.ExitStack() as stack:
        clients = [send_part(stack, port) for _ in range(20)]
        wait_for(lambda: len(service.bodies) == 20)
        assert ask(port, DRAWN)
        assert all(map(is_open, clients))
    wait_for(lambda: len(service.bodies) == 0)


def test_late_body_is_answered(service, port, monkeypatch):
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(service.limits, "body_seconds", 0.1)
        patch.setattr(connections, "SPARE_SECONDS", PATIENCE)
        assert b" 408 " in send_part(stack, port).recv(1000)


def test_oldest_of_too_many_bytes_is_rejected(service, port, monkeypatch):
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(service.limits, "bodies_bytes", 180_000)
        first, second = (send_part(stack, port, 200_000, bytes(60_000)) for _ in range(2))
        wait_for(lambda: len(service.bodies) == 2)
        assert send(port, "/v1/completions", DRAWN | {"user": "x" * 90_000})[0] == 200
        assert b" 429 " in first.recv(1000)
        assert is_open(second)
