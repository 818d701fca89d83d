"""Requests that no endpoint sees: those of pages whose name was made to point here, and those of two lengths."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shardformer.inference.serve.json_responses import answer_error
from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.service import Service


def read_name(host: str) -> str:
    """Returns the name or address in a header Host, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Screen:
    """An ASGI application that passes on the requests that another one may answer."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(Headers(scope=scope))
        except ApiError as error:
            response = answer_error(error)
            response.headers["Connection"] = "close"  # where its body ends may be in doubt
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that reads the other length would take the rest of the body for a request.
            raise ApiError(400, "the request has Content-Length and Transfer-Encoding; send one of them")
        hosts, host = self._service.hosts, headers.get("host")
        if hosts is not None and host is not None and read_name(host) not in hosts:
            raise ApiError(
                403, f"the request is for host {host!r:.80}; this server answers to {', '.join(sorted(hosts))}, and to "
                "further names with allowed_hosts=NAME,...", code="unknown_host",
            )  # fmt: skip
