"""Reads bodies that are JSON or forms, documents of several lines, and HTML."""

import html
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

from writehead.engine.engine import Output
from writehead.serving.errors import ApiError
from writehead.util.extras import requires
from writehead.util.json_files import parse_json

with requires("serve"):
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from pydantic import BaseModel, ValidationError

FORM = "application/x-www-form-urlencoded"
MAX_FIELDS = 1_000  # of a form
LINE = re.compile(r"(\s*\n\s*|^\s+|\s+$)")
OPAQUE = ("script", "style")  # elements whose content is not text

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, model: type[B], lists: Sequence[str] = ()) -> B:
    """Returns the body of a request, JSON or a form; `lists` are fields that a form may repeat."""
    content, data = await request.body(), {}
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind not in ("application/json", FORM):
        raise ApiError(415, f"the body must be application/json or {FORM}")
    try:
        if kind == FORM:
            fields = parse_qs(content.decode(), True, errors="strict", max_num_fields=MAX_FIELDS)
            data = {name: all_ if name in lists else all_[-1] for name, all_ in fields.items()}
        else:
            data = parse_json(content.decode())
    except ValueError as error:
        raise ApiError(400, f"the body is not a valid {kind}: {error}") from error
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


class Part(NamedTuple):
    """A part of a document: text to translate, or what stays as it is."""

    content: str
    is_text: bool


def parts_of(document: str, is_html: bool = False) -> list[Part]:
    """Splits a document into lines, or the text of HTML, and what is between them."""
    if not is_html:
        return _lines(document)
    parser = _Html()
    parser.feed(document)
    parser.close()
    return parser.parts


def join_parts(
    parts: Sequence[Part], outputs: Sequence[Output], rank: int = 0, is_html: bool = False
) -> str:
    """Returns a document whose texts are replaced by their hypotheses of a rank."""
    left, joined = iter(outputs), []
    for part in parts:
        if not part.is_text:
            joined.append(part.content)
            continue
        hypotheses = next(left).hypotheses
        text = hypotheses[min(rank, len(hypotheses) - 1)].text
        joined.append(html.escape(text, quote=False) if is_html else text)
    return "".join(joined)


def _lines(text: str) -> list[Part]:
    # a model invents words for punctuation alone, which is what inline markup may leave
    return [Part(one, any(map(str.isalnum, one))) for one in LINE.split(text) if one]


class _Html(HTMLParser):
    """Collects the texts of HTML, and the markup between them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[Part] = []
        self._opaque = False

    def _keep(self, markup: str) -> None:
        self.parts.append(Part(markup, False))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._opaque = tag in OPAQUE
        self._keep(self.get_starttag_text() or "")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._keep(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._opaque = False
        self._keep(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if self._opaque:
            self._keep(data)
        else:
            self.parts += _lines(data)

    def handle_comment(self, data: str) -> None:
        self._keep(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._keep(f"<!{decl}>")

    def handle_pi(self, data: str) -> None:
        self._keep(f"<?{data}>")

    def unknown_decl(self, data: str) -> None:
        self._keep(f"<![{data}]>")
