"""Errors that a server returns, each in the form of the API that was called."""

from typing import Any

from writehead.errors import one_line
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel

# OpenAI's names of errors
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An HTTP status and one sentence for the client."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)


def error_answers(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Returns OpenAPI's description of the errors of a route that decodes."""
    statuses = (400, 401, 404, 413, 415, 422, 429, 500, 503, 504)
    return {status: {"model": model} for status in statuses}


def error_body(path: str, status: int, message: str) -> dict[str, Any]:
    """Returns an error in the form of the API that a path belongs to."""
    if path.startswith("/v1/"):  # OpenAI's
        kind = TYPES.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}
    if path.startswith("/v2/"):  # DeepL's
        return {"message": message}
    return {"error": message}  # LibreTranslate's


def error_response(
    path: str, status: int, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Returns the response to a request that failed."""
    plain = one_line(message.encode("utf-8", "replace").decode())  # it may quote the client
    return JSONResponse(error_body(path, status, plain), status, headers)
