"""The endpoints: those of OpenAI for texts and vectors, health, metrics, and a page to try the model."""

import asyncio
import functools
import hmac
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from shardformer.inference.serve.exchange import Exchange, StreamedAnswer
from shardformer.inference.serve.json_responses import JsonResponse, answer_error, encode_json
from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.screen import Screen
from shardformer.inference.serve.service import Service

PAGE = Path(__file__).with_name("page.html")
# The page loads nothing and sends nothing to others, and no other page may show it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
CLIENT_GONE = 499  # counted in the metrics
Started = TypeVar("Started")
Handler = Callable[[Service, Request], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """Returns the ASGI application of a service."""
    routes = [
        Route("/v1/completions", _guard(service, _complete), methods=["POST"]),
        Route("/v1/chat/completions", _guard(service, _chat), methods=["POST"]),
        Route("/v1/responses", _guard(service, _respond), methods=["POST"]),
        Route("/v1/responses/{name}", _guard(service, _show_response), methods=["GET"]),
        Route("/v1/responses/{name}", _guard(service, _remove_response), methods=["DELETE"]),
        Route("/v1/embeddings", _guard(service, _embed), methods=["POST"]),
        Route("/v1/models", _guard(service, _list_models)),
        Route("/v1/models/{name:path}", _guard(service, _show_model)),
        Route("/metrics", _guard(service, _show_metrics)),
        Route("/health", _guard(service, _check_health, is_open=True)),
        Route("/", _guard(service, _show_page, is_open=True)),
    ]

    paths = [
        f"{' and '.join(sorted((route.methods or set()) - {'HEAD'}))} {re.sub('{.*}', 'NAME', route.path)}"
        for route in routes
    ]

    async def explain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        got = f"{request.method} {request.url.path:.80} is not answered"
        return answer_error(ApiError(error.status_code, f"{got}; there are {', '.join(paths)}", code="not_found"))

    middleware = [Middleware(Screen, service)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={404: explain, 405: explain})


def _guard(service: Service, handler: Handler, is_open: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """Returns an endpoint that checks the key, counts the request and answers errors as JSON."""

    async def endpoint(request: Request) -> Response:
        try:
            if not is_open:
                _check_key(service, request)
            response = await handler(service, request)
        except ApiError as error:
            response = answer_error(error)
        except ClientDisconnect:  # nobody receives the answer
            response = Response(status_code=CLIENT_GONE)
        except Exception as error:  # a defect of this server, which ends this request only
            response = answer_error(_report(error))
        service.metrics.count_request(request.scope["route"].path, response.status_code)
        return response

    return endpoint


def _report(error: Exception) -> ApiError:
    """Prints a defect's traceback; returns what the client is told."""
    traceback.print_exception(error)
    return ApiError(500, f"the request failed: {type(error).__name__}: {error!s:.200}")


def _check_key(service: Service, request: Request) -> None:
    given = request.headers.get("authorization", "").partition("Bearer ")[2]
    if service.api_key and not hmac.compare_digest(given.encode(), service.api_key.encode()):
        what = "a wrong key" if given else "no key"
        raise ApiError(
            401, f"the request has {what}; send the header Authorization: Bearer KEY", code="invalid_api_key"
        )


async def _start(service: Service, request: Request, start: Callable[[bytes], Awaitable[Started]]) -> Started:
    # A page of another site can send any other type without asking first, a browser would let it use this server.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "the content type is not application/json; send the header Content-Type: application/json")
    async with service.bodies.receive(request) as content:
        return await start(content)


async def _complete(service: Service, request: Request) -> Response:
    return await _answer(service, request, chat=False)


async def _chat(service: Service, request: Request) -> Response:
    return await _answer(service, request, chat=True)


async def _answer(service: Service, request: Request, chat: bool) -> Response:
    return await _send_answer(service, request, functools.partial(service.start, chat=chat))


async def _respond(service: Service, request: Request) -> Response:
    return await _send_answer(service, request, service.start_response)


async def _send_answer(service: Service, request: Request, start: Callable[[bytes], Awaitable[Exchange]]) -> Response:
    exchange = await _start(service, request, start)
    if exchange.answer.fields.stream:
        return EventResponse(service, exchange)
    return await _wait_for_answer(request, exchange)


async def _show_response(service: Service, request: Request) -> Response:
    stored = service.responses.find(request.path_params["name"])
    return Response(stored.response, media_type="application/json")


async def _remove_response(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.responses.remove(name)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


async def _embed(service: Service, request: Request) -> Response:
    return await _wait_for_answer(request, await _start(service, request, service.start_embeddings))


async def _wait_for_answer(request: Request, exchange: Exchange) -> Response:
    answering = asyncio.ensure_future(_collect(exchange))
    leaving = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return JsonResponse(answering.result())
    finally:
        for task in (answering, leaving):
            task.cancel()
        exchange.cancel()


async def _collect(exchange: Exchange) -> dict:
    async for index, tokens in exchange.events():
        if tokens:
            exchange.answer.add(index, tokens)
    return await asyncio.to_thread(exchange.answer.as_object)  # vectors of megabytes would let others wait


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventResponse(StreamingResponse):
    """Server-sent events. A client that is gone, or that reads too slowly, ends its jobs."""

    def __init__(self, service: Service, exchange: Exchange[StreamedAnswer]):
        self._seconds, self._exchange = service.limits.seconds, exchange
        super().__init__(_write_events(exchange), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope, receive, send) -> None:
        try:
            async with asyncio.timeout(2 * self._seconds):  # a slow reader has as long as its text, again
                await super().__call__(scope, receive, send)
        except TimeoutError:
            pass
        finally:
            self._exchange.cancel()


async def _write_events(exchange: Exchange[StreamedAnswer]) -> AsyncIterator[bytes]:
    answer = exchange.answer
    try:
        for event in answer.first_events():
            yield _format_event(event)
        async for index, tokens in exchange.events():
            for event in answer.next_events(index, tokens):
                yield _format_event(event)
        for event in answer.final_events():
            yield _format_event(event)
    except ApiError as error:  # the status has been sent
        yield _format_event(answer.describe_failure(error))
    except Exception as error:
        yield _format_event(answer.describe_failure(_report(error)))
    yield answer.ending


def _format_event(event: dict) -> bytes:
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + encode_json(event) + b"\n\n"


def _describe_model(service: Service, name: str) -> dict:
    model = service.models[name]
    described = {"id": name, "object": "model", "created": model.created, "owned_by": "shardformer"}
    more = {"max_model_len": service.seq, "checkpoint": model.weights.name, "chat": service.chat is not None}
    return described | more


async def _list_models(service: Service, request: Request) -> Response:
    return JsonResponse({"object": "list", "data": [_describe_model(service, name) for name in service.models]})


async def _show_model(service: Service, request: Request) -> Response:
    return JsonResponse(_describe_model(service, service.find_model(request.path_params["name"]).name))


async def _check_health(service: Service, request: Request) -> Response:
    alive = service.thread.is_alive()
    return JsonResponse({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)


async def _show_metrics(service: Service, request: Request) -> Response:
    engine = service.thread.engine
    running = len(engine.running)
    gauges: dict[str, tuple[float, str]] = {
        "running": (running, "continuations in slots"),
        "waiting": (max(service.thread.accepted - running, 0), "continuations that wait for a slot"),
        "slots": (engine.programs.rows, "continuations that are computed together"),
    }
    if engine.prefixes:
        gauges["prefix_cache_bytes"] = engine.prefixes.bytes, "bytes of the prefix cache"
    text = service.metrics.as_text(gauges)
    return PlainTextResponse(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _show_page(service: Service, request: Request) -> Response:
    headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(PAGE.read_text("utf-8"), headers=headers)
