"""A server that answers as S3 documents: conditional puts, ranges, listings, and any answer that a test asks for."""

import contextlib
import hashlib
import re
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODIFIED = "Mon, 23 Nov 2026 10:00:00 GMT"
STATUS = {
    "ConditionalRequestConflict": 409,
    "OperationAborted": 409,
    "PreconditionFailed": 412,
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "SlowDown": 503,
    "InternalError": 500,
    "RequestTimeout": 400,
}
RESET_BEFORE, RESET_AFTER = "reset before", "reset after"


class FakeS3:
    """Objects in memory. `answers` are given in order to the requests that `selects` chooses.

    An answer is a code of STATUS, or a reset of the connection before or after the request was carried out.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.answers: list[str] = []
        self.selects: Callable[[str, str, Any], bool] = lambda method, key, headers: False
        self.requests: list[tuple[str, str]] = []
        self.one_at_a_time = threading.Lock()

    def fail(self, selects: Callable[[str, str, Any], bool], *answers: str) -> None:
        self.selects, self.answers = selects, list(answers)

    def take_answer(self, method: str, key: str, headers) -> str:
        self.requests.append((method, key))
        return self.answers.pop(0) if self.answers and self.selects(method, key, headers) else ""


def is_create(method: str, key: str, headers) -> bool:
    return method == "PUT" and headers["If-None-Match"] == "*"


def is_swap(method: str, key: str, headers) -> bool:
    return method == "PUT" and headers["If-Match"] is not None


def is_put(method: str, key: str, headers) -> bool:
    return method == "PUT"


@contextlib.contextmanager
def serving(patch) -> Iterator[FakeS3]:
    """Starts the server, and points the S3 client of this process at it."""
    s3 = FakeS3()

    class Handler(_Handler):
        server_of_objects = s3

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "y"),
    ):
        patch.setenv(name, value)
    try:
        yield s3
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_objects: FakeS3

    def log_message(self, *_) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def _answer(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path, _, query = self.path.partition("?")
        key = urllib.parse.unquote(path).lstrip("/").partition("/")[2]
        s3 = self.server_of_objects
        with s3.one_at_a_time:
            answer = s3.take_answer(self.command, key, self.headers)
            if answer == RESET_BEFORE:
                return self._reset()
            if answer and answer != RESET_AFTER:
                return self._send_error_code(answer)
            status, headers, body = self._carry_out(s3.objects, key, urllib.parse.parse_qs(query, True), content)
            if answer == RESET_AFTER:
                return self._reset()
        self._send(status, headers, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer

    def _carry_out(self, objects: dict[str, bytes], key: str, query: dict, content: bytes):
        if self.command == "PUT":
            return self._put(objects, key, content)
        if self.command == "DELETE":
            objects.pop(key, None)
            return 204, {}, b""
        if self.command == "POST":  # DeleteObjects
            keys = re.findall("<Key>(.*?)</Key>", content.decode())
            for name in keys:
                objects.pop(name, None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in keys)
            return 200, {"Content-Type": "application/xml"}, f"<DeleteResult>{deleted}</DeleteResult>".encode()
        if "list-type" in query:
            return 200, {"Content-Type": "application/xml"}, _list(objects, query.get("prefix", [""])[0])
        if key not in objects:
            return _error("NoSuchKey")
        return self._get(objects[key])

    def _put(self, objects: dict[str, bytes], key: str, content: bytes):
        expected = self.headers["If-Match"]
        if self.headers["If-None-Match"] == "*" and key in objects:
            return _error("PreconditionFailed")
        if expected is not None and key not in objects:
            return _error("NoSuchKey")
        if expected is not None and expected != _tag(objects[key]):
            return _error("PreconditionFailed")
        objects[key] = content
        return 200, {"ETag": _tag(content)}, b""

    def _get(self, found: bytes):
        headers = {"ETag": _tag(found), "Last-Modified": MODIFIED}
        if asked := self.headers["Range"]:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            body = found[int(first) : int(last) + 1]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(found)}"
            return 206, headers, body
        return 200, headers, found

    def _send_error_code(self, code: str) -> None:
        self._send(*_error(code))

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _error(code: str) -> tuple[int, dict[str, str], bytes]:
    body = f"<Error><Code>{code}</Code><Message>As documented</Message></Error>"
    return STATUS[code], {"Content-Type": "application/xml"}, body.encode()


def _list(objects: dict[str, bytes], prefix: str) -> bytes:
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-23T10:00:00.000Z</LastModified>"
        f"<ETag>{_tag(content)}</ETag><Size>{len(content)}</Size></Contents>"
        for key, content in sorted(objects.items())
        if key.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
