"""API keys in the Authorization header."""

from typing import Annotated

from writehead.serving.service import Service
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import Depends, Request

BEARER = "bearer "  # as OpenAI's clients send it


def key_in_header(request: Request, scheme: str) -> str | None:
    """Returns the key after a scheme such as `bearer `, if there is one."""
    given = request.headers.get("authorization", "")
    return given[len(scheme) :] if given.lower().startswith(scheme) else None


async def check_bearer(request: Request) -> None:
    """Raises 401 if the server has keys and the request has none of them."""
    service: Service = request.app.state.service
    service.check_key(key_in_header(request, BEARER))


Key = Annotated[None, Depends(check_bearer)]
