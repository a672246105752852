"""The API key in the Authorization header, as OpenAI's clients send it."""

from typing import Annotated

from writehead.serving.service import Service
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import Depends, Request
    from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

bearer = HTTPBearer(auto_error=False, description="Only if the server was started with keys.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


async def check_bearer(request: Request, credentials: Credentials) -> None:
    """Raises 401 if the server has keys and the request has none of them."""
    service: Service = request.app.state.service
    service.check_key(credentials.credentials if credentials is not None else None)


Key = Annotated[None, Depends(check_bearer)]
