"""JSON in the responses of the server."""

import json
from typing import Any

from starlette.responses import Response

from shardformer.inference.serve.api_errors import ApiError


class JsonResponse(Response):
    """A JSON object; characters that UTF-8 cannot encode are escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


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
    return JsonResponse(error.body, error.status, headers)
