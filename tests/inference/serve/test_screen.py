"""Requests under another name than the server's, and requests with two lengths, reach no endpoint."""

import json
import socket

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.inference.serve.http_server import send
from tests.waiting import PATIENCE

NAMES = ["localhost", "127.0.0.1:8000", "[::1]:99", "LOCALHOST:1"]
OTHERS = ["evil.example", "127.0.0.1.evil.example:8000", "", "[::1", "[::2]:8000", "localhost@evil.example"]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nowhere"])
def test_other_hosts_are_rejected(service, port, monkeypatch, path):
    """A page of evil.example whose address became 127.0.0.1 would read the answers."""
    monkeypatch.setattr(service, "hosts", frozenset(["localhost", "127.0.0.1", "::1"]))
    for host in OTHERS:
        status, content = send(port, path, headers={"Host": host})
        assert (status, json.loads(content)["error"]["code"]) == (403, "unknown_host")
        assert "allowed_hosts=NAME" in json.loads(content)["error"]["message"]
    for host in NAMES:
        assert send(port, path, headers={"Host": host})[0] == (404 if path == "/nowhere" else 200)


def exchange(port, request: bytes) -> bytes:
    """Returns all that the server sends until it closes the connection."""
    content = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(request)
        while part := client.recv(1000):
            content += part
    return content


def test_request_without_host_is_no_page(service, port, monkeypatch):
    monkeypatch.setattr(service, "hosts", frozenset(["localhost"]))
    assert b" 200 " in exchange(port, b"GET /health HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_two_lengths_are_rejected(port, path):
    """A proxy that reads the other length would pass on the second request as a part of the first."""
    second = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(second)
    answer = exchange(port, head + lengths + b"0\r\n\r\n" + second)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Length and Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1 ") == 1
