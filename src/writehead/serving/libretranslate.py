"""LibreTranslate's API: /translate and /languages."""

from itertools import islice
from typing import Annotated, Any, Literal

from writehead.config import DecodeConfig
from writehead.engine.engine import BEAM
from writehead.serving.bodies import body_schema, join_parts, parts_of, read_body
from writehead.serving.service import Service
from writehead.serving.settings import BEAM_LIMIT
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Request
    from pydantic import BaseModel, Field

router = APIRouter(tags=["LibreTranslate"])


class TranslateBody(BaseModel):
    """The body of POST /translate."""

    q: str | list[str] = Field(description="Text, or a list of texts.")
    source: str = Field(description="Language code, or auto.")
    target: str = Field(description="Language code.")
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, le=BEAM_LIMIT - 1)] = 0
    api_key: str | None = None


class TranslateAnswer(BaseModel):
    """The translation, or a list of them; alternatives if any were asked for."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = None


class ErrorAnswer(BaseModel):
    """The reason why a request failed."""

    error: str


class Language(BaseModel):
    """A language and the languages it can be translated to."""

    code: str
    name: str
    targets: list[str]


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 413, 415, 422, 429, 500, 503, 504)
}


@router.post(
    "/translate",
    response_model=TranslateAnswer,
    response_model_exclude_none=True,
    responses=ERRORS,
    openapi_extra=body_schema(TranslateBody),
)
async def translate(request: Request) -> dict[str, Any]:
    """Translates texts; lines of a text are translated one by one."""
    service: Service = request.app.state.service
    body = await read_body(request, TranslateBody, lists=())
    service.check_key(body.api_key)
    model, codes = service.models.translator(source=body.source, target=body.target)
    is_html, count = body.format == "html", 1 + body.alternatives
    documents = [body.q] if isinstance(body.q, str) else body.q
    parts = [parts_of(document, is_html) for document in documents]
    texts = [part.content for some in parts for part in some if part.is_text]
    options = DecodeConfig(beam=max(BEAM, count), n_best=count)
    left = iter((await service.decode(request, model, texts, options, codes=codes)).outputs)
    found: list[list[str]] = []
    for some in parts:
        outputs = [*islice(left, sum(part.is_text for part in some))]
        ranks = min(count, max((len(one.hypotheses) for one in outputs), default=1))
        found.append([join_parts(some, outputs, rank, is_html) for rank in range(ranks)])
    best, others = [one[0] for one in found], [one[1:] for one in found]
    is_list = isinstance(body.q, list)
    answer: dict[str, Any] = {"translatedText": best if is_list else best[0]}
    if body.alternatives:
        answer["alternatives"] = others if is_list else others[0]
    return answer


@router.get("/languages", response_model=list[Language])
async def languages(request: Request) -> list[dict[str, object]]:
    """Lists the languages of all models."""
    service: Service = request.app.state.service
    return service.models.languages()
