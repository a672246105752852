"""Server-sent events, the form in which text is streamed."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from writehead.serving.errors import ApiError, error_body
from writehead.util.extras import requires

with requires("serve"):
    from fastapi.responses import StreamingResponse

DONE = "data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # for reverse proxies
# OpenAPI's description of a route that can stream
STREAM: dict[str, Any] = {"content": {"text/event-stream": {}}}


class ServerSentEvents(StreamingResponse):
    """Streams objects as events, and [DONE] at the end; an error is the last event."""

    def __init__(self, path: str, events: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(_encode(path, events), media_type="text/event-stream", headers=HEADERS)


async def _encode(path: str, events: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    async with aclosing(events) as source:
        try:
            async for event in source:
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except ApiError as error:
            body = error_body(path, error.status_code, error.detail)
            yield f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    yield DONE
