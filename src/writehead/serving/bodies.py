"""Reads bodies that are JSON or forms."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from writehead.serving.errors import ApiError
from writehead.util.extras import requires
from writehead.util.json_files import parse_json

with requires("serve"):
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from pydantic import BaseModel, Field, ValidationError

FORM = "application/x-www-form-urlencoded"
NEEDS_JSON = "the body must be JSON; send the header Content-Type: application/json"
MAX_FIELDS = 1_000  # of a form

B = TypeVar("B", bound=BaseModel)
# otherwise, every wrong item makes an error, of which there may be half a million
TextList = Annotated[list[str], Field(fail_fast=True)]
Texts = str | TextList


async def read_body(request: Request, model: type[B], lists: Sequence[str] = ()) -> B:
    """Returns the body of a request, JSON or a form; `lists` are fields that a form may repeat."""
    content, data = await request.body(), {}
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind not in ("application/json", FORM):
        raise ApiError(415, f"the body must be application/json or {FORM}")
    if kind == FORM and content.lstrip().startswith(b"{"):  # as curl sends it
        raise ApiError(415, NEEDS_JSON)
    try:
        if kind == FORM:
            fields = parse_qs(content.decode(), True, errors="strict", max_num_fields=MAX_FIELDS)
            data = {name: all_ if name in lists else all_[-1] for name, all_ in fields.items()}
        else:
            data = parse_json(content.decode())
    except ValueError as error:
        name = "a valid form" if kind == FORM else "valid JSON"
        raise ApiError(400, f"the body is not {name}: {error}") from error
    try:
        return model.model_validate(data, strict=kind != FORM)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(errors) from error


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the part of OpenAPI's description of a route that `read_body` needs."""
    schema = model.model_json_schema()
    content = {kind: {"schema": schema} for kind in ("application/json", FORM)}
    return {"requestBody": {"required": True, "content": content}}
