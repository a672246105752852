"""The API key in the Authorization header, as OpenAI's clients send it."""

from typing import Annotated

from writehead.serving.service import Service
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import Depends, Request

SCHEME = "bearer "


async def check_bearer(request: Request) -> None:
    """Raises 401 if the server has keys and the request has none of them."""
    service: Service = request.app.state.service
    given = request.headers.get("authorization", "")
    service.check_key(given[len(SCHEME) :] if given.lower().startswith(SCHEME) else None)


Key = Annotated[None, Depends(check_bearer)]
