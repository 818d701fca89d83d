"""JSON in the responses of the server."""

import asyncio
import json
from typing import Any

from starlette.responses import Response

from shardformer.inference.serve.request_fields import ApiError

DISCARDED_BYTES, DISCARD_SECONDS = 100_000_000, 5.0  # of a body that is too large, after its answer


class JsonResponse(Response):
    """A JSON object; characters that UTF-8 cannot encode are escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class EarlyResponse(JsonResponse):
    """An answer to a request whose body still arrives: a client that is cut off while it sends would not read it."""

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left = DISCARDED_BYTES
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0 and (message := await receive()).get("more_body"):
                    left -= len(message["body"])
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


def encode_json(content: Any) -> bytes:
    """Returns UTF-8; a lone surrogate, which UTF-8 lacks, becomes an escape."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(content, allow_nan=False).encode()


def answer_error(error: ApiError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else {}
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    kind = EarlyResponse if error.status == 413 else JsonResponse
    return kind(error.body, error.status, headers)
