"""The FastAPI application: routes of all APIs, errors, logs and the life of the worker."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from writehead import __version__
from writehead.serving import deepl, libretranslate, openai, translate
from writehead.serving.bodies import NEEDS_JSON
from writehead.serving.errors import ApiError, error_response
from writehead.serving.models import Models, Served
from writehead.serving.service import GONE, ClientGone, Facts, Service
from writehead.serving.settings import Settings
from writehead.serving.validation import describe, describe_json
from writehead.serving.worker import Worker
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import JSONResponse, PlainTextResponse
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# the page loads and calls nothing but this server
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
SLOW_SECONDS = 10.0  # after the deadline, for a body to arrive or an answer to be read
QUIET = ("/health", "/ready", "/metrics")  # not logged unless they fail


def make_app(models: Sequence[Served], settings: Settings | None = None) -> FastAPI:
    """Returns the application for models; the first is the default."""
    settings, known = settings or Settings(), Models(models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = Service(known, settings, Worker())
        try:
            yield
        finally:
            service.is_draining = True
            service.worker.stop()

    app = FastAPI(
        title="writehead",
        version=__version__,
        description="Translation and text generation with continuous batching. If the server has "
        "keys, pass one as `Authorization: Bearer KEY`; LibreTranslate's API takes `api_key`.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    for api in (translate, openai, libretranslate, deepl):
        app.include_router(api.router)
    _add_status(app)
    _add_page(app)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(Gate, settings=settings)
    return app


def _add_status(app: FastAPI) -> None:
    @app.get("/health", tags=["status"], responses={503: {}})
    async def health(request: Request) -> Response:
        """Whether the server can decode."""
        alive = request.app.state.service.worker.is_alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @app.get("/ready", tags=["status"], responses={503: {}})
    async def ready(request: Request) -> Response:
        """Whether the server accepts requests."""
        service = request.app.state.service
        is_ready = service.worker.is_alive and not service.is_draining
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/version", tags=["status"])
    async def version() -> dict[str, str]:
        """The version of writehead."""
        return {"version": __version__}

    @app.get("/metrics", tags=["status"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        registry = request.app.state.service.metrics.registry
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    folder = resources.files("writehead.serving") / "page"
    for path, (name, kind) in PAGE.items():
        route = _file((folder / name).read_bytes(), kind)
        app.add_api_route(path, route, include_in_schema=False)

    @app.get("/page.json", include_in_schema=False)
    async def page(request: Request) -> dict[str, Any]:
        """What the page needs to know before it has a key."""
        service: Service = request.app.state.service
        return {
            "version": __version__,
            "needs_key": bool(service.settings.keys),
            "compare": service.settings.compare,
            "models": [
                {
                    "id": one.name,
                    "translates": one.translates,
                    "languages": one.languages,
                    "codes": [*map(sorted, one.code_lists)],
                }
                for one in service.models
            ],
        }


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return file


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, message = error.status_code, str(error.detail)
    if isinstance(error.__cause__, ClientDisconnect):
        raise ClientGone from error
    if not isinstance(error, ApiError):
        message = {
            404: f"there is no {request.url.path}",
            400: f"the body is not valid JSON: {_reason(error)}",
        }.get(status, message)
    headers = dict(error.headers or {})
    return error_response(request.url.path, status, message, headers)


def _reason(error: HTTPException) -> str:
    """Returns why FastAPI could not read a body."""
    cause = error.__cause__
    return "it is nested too deeply" if isinstance(cause, RecursionError) else str(cause)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults, path = error.errors(), request.url.path
    if faults[0]["type"] == "json_invalid":
        reason = describe_json(faults[0], error.body)
        return error_response(path, 400, f"the body is not valid JSON: {reason}")
    if isinstance(faults[0].get("input"), bytes):  # FastAPI parses only what is declared as JSON
        return error_response(path, 415, NEEDS_JSON)
    return error_response(path, 422, describe(faults))


class Gate:
    """Gives each request an id, limits its body, adds headers, and writes its log line."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        facts = scope["writehead.facts"] = Facts(uuid.uuid4().hex, time.perf_counter())
        limit, size, status = self.settings.limits.body_bytes, 0, GONE

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise self._too_large()
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = {"X-Request-Id": facts.id, **SECURITY}
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name.lower().encode(), text.encode()) for name, text in extra.items()),
                ]
            await send(message)

        try:
            if _content_length(scope) > limit:
                error = self._too_large()
                response = error_response(scope["path"], error.status_code, error.detail)
                await response(scope, receive, answer)
                return
            async with asyncio.timeout(self.settings.limits.deadline + SLOW_SECONDS):
                await self.app(scope, limited, answer)
        except (ClientGone, ClientDisconnect):
            status = GONE
        except asyncio.CancelledError:  # the grace period after SIGTERM is over
            if status == GONE:
                message = "the server is shutting down; retry"
                response = error_response(scope["path"], 503, message, {"Retry-After": "5"})
                await response(scope, receive, answer)
            raise
        except TimeoutError:
            log.warning("request %s: the client sends or reads too slowly", facts.id)
            if status == GONE:
                message = "the request did not arrive in time"
                await error_response(scope["path"], 408, message)(scope, receive, answer)
        except Exception:
            log.exception("request %s failed", facts.id)
            if status == GONE:  # the response has not started
                message = f"the server failed; the operator finds the cause by the id {facts.id}"
                await error_response(scope["path"], 500, message)(scope, receive, answer)
        finally:
            self._log(scope, facts, status)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self.settings.limits.body_bytes:,} bytes")

    def _log(self, scope: Scope, facts: Facts, status: int) -> None:
        state = scope["app"].state
        if hasattr(state, "service"):
            state.service.metrics.responses.labels(str(status)).inc()
        if scope["path"] in QUIET and status < 400:
            return
        entry: dict[str, Any] = {
            "time": round(time.time(), 3),
            "id": facts.id,
            "client": (scope.get("client") or [None])[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(1e3 * (time.perf_counter() - facts.arrived), 3),
        }
        if facts.model is not None:
            entry |= {"model": facts.model, "prompt_tokens": facts.prompt_tokens}
            entry |= {"tokens": facts.tokens}
        for name in ("queued", "first_token"):
            if (seconds := getattr(facts, name)) is not None:
                entry[f"{name}_ms"] = round(1e3 * seconds, 3)
        if facts.texts:
            entry["texts"] = facts.texts
        requests_log.info("%s", json.dumps(entry))


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and re.fullmatch(rb"\d{1,18}", value):
            return int(value)
    return 0


requests_log = logging.getLogger("writehead.serving.requests")
