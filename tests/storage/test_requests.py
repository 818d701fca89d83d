"""Requests to a bucket over a bad connection, and the messages of requests that fail."""

import http.server
import re
import threading

import obstore
import pytest
from obstore import exceptions
from obstore.store import S3Store

from shardformer.storage import BucketPath, bucket, requests
from shardformer.storage.bucket import ChangedError, UnansweredError
from tests.storage.faults import RESET, Scripted
from tests.surroundings import before_call, change_patience, open_buckets
from tests.waiting import PATIENCE

OBJECT = BucketPath("s3", "bucket", "runs/a")
XML = "<Error><Code>{}</Code><Message>{}</Message><RequestId>1</RequestId></Error>"
REJECTED = (
    "Generic S3 error: Error performing PUT http://127.0.0.1:5602/checkpoints/a0 in 9.647995ms - "
    'Server returned non-2xx status code: 400 Bad Request: <?xml version="1.0" encoding="UTF-8"?>\n{}\n\n'
    "Debug source:\nGeneric {{\n    store: S3,\n    source: RetryError(..)\n}}"
)
REFUSED = (
    "Generic S3 error: Error performing PUT http://127.0.0.1:5999/checkpoints/a0 in 1.532164243s, after 10 retries, "
    "max_retries: 10, retry_timeout: 180s  - HTTP error: error sending request\n\nDebug source:\nGeneric {\n"
    "    inner: Http(\n        HttpError {\n            kind: Connect,\n"
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    change_patience(monkeypatch, pause=0.0)
    monkeypatch.setattr(requests, "_answered", set())
    monkeypatch.setattr(requests, "_silent", set())


@pytest.fixture(params=[False, True], ids=["reset", "answer lost"])
def faults(request, monkeypatch):
    return Scripted(request.param).install(monkeypatch)


def fail(text: str, kind: type[Exception] = exceptions.GenericError):
    def call():
        raise kind(text)

    return call


def test_puts_and_reads_are_repeated(place, faults):
    bucket.write(place, b"one")
    assert bucket.read(place)[0] == b"one"
    assert bytes(bucket.read_range(place, 1, 2)) == b"ne"
    assert bucket.head(place).bytes == 3


def test_listings_and_deletions_are_repeated(place, faults):
    for name in ("a", "b", "c"):
        bucket.write(place / name, b"")
    assert set(bucket.list_objects(place)) == {"a", "b", "c"}
    bucket.delete([place / "a", place / "b"])
    assert set(bucket.list_objects(place)) == {"c"}


def test_create_is_repeated(place, faults):
    version = bucket.create(place, b"mine")
    assert bucket.read(place) == (b"mine", version)


def test_swap_is_repeated(place, monkeypatch):
    for answer_lost in (False, True):
        version = bucket.write(place, b"old")
        with monkeypatch.context() as patch:
            Scripted(answer_lost).install(patch)
            version = bucket.swap(place, b"new", version)
        assert bucket.read(place) == (b"new", version)


@pytest.mark.parametrize("answer_lost", [False, True])
def test_repeated_create_keeps_another_runs_object(place, monkeypatch, answer_lost):
    """The negative twin: the object that a repeated put finds is not its own."""
    bucket.write(place, b"another's")
    Scripted(answer_lost).install(monkeypatch)
    with pytest.raises(ChangedError):
        bucket.create(place, b"mine")
    assert bucket.read(place)[0] == b"another's"


def test_repeated_swap_keeps_another_runs_object(place, monkeypatch):
    version = bucket.write(place, b"old")
    bucket.write(place, b"another's")
    Scripted(answer_lost=False).install(monkeypatch)
    with pytest.raises(ChangedError):
        bucket.swap(place, b"mine", version)
    assert bucket.read(place)[0] == b"another's"


def test_without_patience_the_same_faults_fail(place, faults, monkeypatch):
    change_patience(monkeypatch, first=-1)
    with pytest.raises(UnansweredError):
        bucket.create(place, b"mine")


def test_first_request_of_a_bucket_fails_sooner(monkeypatch):
    change_patience(monkeypatch, first=0.0, pause=0.001)
    with pytest.raises(UnansweredError):
        requests.send(OBJECT, fail(RESET))
    requests.send(OBJECT, lambda: None)
    answers = iter([fail(RESET), fail(RESET), lambda: "answer"])
    assert requests.send(OBJECT, lambda: next(answers)()) == "answer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            REJECTED.format(XML.format("ExpiredToken", "The provided token has expired.")),
            "The credentials have expired; log in again (aws sso login), or set new AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
        ),
        (
            REJECTED.format(XML.format("InvalidAccessKeyId", "No such key.")),
            "InvalidAccessKeyId: No such key.; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
        ),
        (
            REJECTED.format(XML.format("RequestTimeTooSkewed", "The difference is too large.")),
            "This machine's clock is wrong; set it (timedatectl)",
        ),
        (
            REJECTED.format(XML.format("QuotaExceeded", "")),
            "The bucket is full (QuotaExceeded); free some space, or raise its quota",
        ),
        (
            "Generic S3 error: Error performing PUT http://h/k in 2ms - Server returned non-2xx status code: 507 "
            "Insufficient Storage: ",
            "The bucket is full (507 Insufficient Storage); free some space, or raise its quota",
        ),
        (
            REFUSED,
            "http://127.0.0.1:5999: no connection; check the network, and AWS_ENDPOINT_URL if it is set",
        ),
        (
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 8.29926ms - Server "
            "returned non-2xx status code: 403 Forbidden: denied\n",
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token - Server returned non-2xx "
            "status code: 403 Forbidden: denied; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
        ),
        (REJECTED.format(XML.format("EntityTooLarge", "It is too large.")), "EntityTooLarge: It is too large."),
    ],
)
def test_messages_have_one_line_with_advice(text, message, monkeypatch):
    change_patience(monkeypatch, first=-1)
    with pytest.raises(OSError, match=re.escape(message)) as caught:
        requests.send(OBJECT, fail(text))
    assert caught.value.strerror == message


@pytest.fixture
def rejecting_server(monkeypatch):
    """Yields a list for (status, code); each request to the server is rejected so, and HEAD gets no body."""
    answer = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, code = answer[0]
            body = XML.format(code, "The reason.").encode() if self.command == "GET" else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {"endpoint": f"http://127.0.0.1:{server.server_address[1]}", "region": "us-east-1"}
        options |= {"access_key_id": "x", "secret_access_key": "y"}
        s3 = S3Store("bucket", **options, client_options={"allow_http": True})
        open_buckets(monkeypatch, lambda *_: s3)
        yield answer
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "ExpiredToken", "The credentials have expired; log in again (aws sso login)"),
        (403, "RequestTimeTooSkewed", "This machine's clock is wrong; set it (timedatectl)"),
        (403, "InvalidAccessKeyId", "InvalidAccessKeyId: The reason.; set AWS_ACCESS_KEY_ID"),
    ],
)
def test_rejected_head_names_the_reason(rejecting_server, status, code, message):
    """An answer to HEAD has no body, so the reason comes from a GET."""
    rejecting_server.append((status, code))
    for ask in (bucket.head, BucketPath.exists):
        with pytest.raises(PermissionError) as caught:
            ask(OBJECT)
        assert caught.value.strerror.startswith(message)


def test_head_of_a_missing_object_is_none(rejecting_server):
    """The negative twin: no further request is needed."""
    rejecting_server.append((404, "NoSuchKey"))
    assert bucket.head(OBJECT) is None


def test_unanswered_head_is_not_asked_by_get(monkeypatch):
    """A bucket that does not answer would keep the user waiting twice as long."""
    asked = []
    change_patience(monkeypatch, first=-1)
    monkeypatch.setattr(bucket, "_store", lambda _: None)
    before_call(monkeypatch, obstore, "head", lambda *_: fail(RESET)())
    before_call(monkeypatch, obstore, "get_range", lambda *_, **__: asked.append(1))
    with pytest.raises(UnansweredError):
        bucket.head(OBJECT)
    assert not asked


def test_missing_bucket_is_named():
    text = "Object at location a not found: <Error><Code>NoSuchBucket</Code></Error>"
    with pytest.raises(FileNotFoundError, match="The bucket bucket does not exist; create it first"):
        requests.send(OBJECT, fail(text, FileNotFoundError))


@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
def test_overloaded_server_is_asked_again(code):
    answers = iter([fail(REJECTED.format(XML.format(code, "Try again."))), lambda: "answer"])
    assert requests.send(OBJECT, lambda: next(answers)()) == "answer"


def test_expired_credentials_are_not_repeated():
    answers = iter([fail(REJECTED.format(XML.format("ExpiredToken", "."))), lambda: "answer"])
    with pytest.raises(PermissionError):
        requests.send(OBJECT, lambda: next(answers)())


def test_silent_server_is_announced_once(monkeypatch, capsys):
    change_patience(monkeypatch, silence=0.05)
    announced = threading.Event()
    print_silence = requests._print_silence

    def announce(name, patience):
        print_silence(name, patience)
        announced.set()

    monkeypatch.setattr(requests, "_print_silence", announce)

    def wait():
        announced.wait(PATIENCE)

    requests.send(OBJECT, wait)
    change_patience(monkeypatch, silence=PATIENCE)
    requests.send(OBJECT, lambda: None)
    assert capsys.readouterr().err.splitlines() == [
        "s3://bucket has not answered for 0.05 s; trying for 30 s",
        "s3://bucket answers again",
    ]


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_server_error_is_asked_again(status):
    text = (
        f"Generic S3 error: Error performing GET http://h/b/k in 1ms - Server returned non-2xx status code: {status}: "
    )
    answers = iter([fail(text), lambda: "answer"])
    assert requests.send(OBJECT, lambda: next(answers)()) == "answer"


def test_bucket_that_stopped_answering_has_less_patience(monkeypatch):
    requests.send(OBJECT, lambda: None)
    change_patience(monkeypatch, most=-1)
    with pytest.raises(UnansweredError):
        requests.send(OBJECT, fail(RESET))
    assert not requests._answered
