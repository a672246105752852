"""LibreTranslate's API: /translate and /languages."""

from typing import Annotated, Any, Literal

from writehead.config import DecodeConfig
from writehead.engine.engine import BEAM
from writehead.serving.bodies import Texts, body_schema, read_body
from writehead.serving.documents import translate_documents
from writehead.serving.errors import error_answers
from writehead.serving.service import Service
from writehead.serving.settings import BEAM_LIMIT
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Request
    from pydantic import BaseModel, Field

router = APIRouter(tags=["LibreTranslate"])


class TranslateBody(BaseModel):
    """The body of POST /translate."""

    q: Texts = Field(description="Text, or a list of texts.")
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


@router.post(
    "/translate",
    response_model=TranslateAnswer,
    response_model_exclude_none=True,
    responses=error_answers(ErrorAnswer),
    openapi_extra=body_schema(TranslateBody),
)
async def translate(request: Request) -> dict[str, Any]:
    """Translates texts; lines of a text are translated one by one."""
    service: Service = request.app.state.service
    body = await read_body(request, TranslateBody)
    service.check_key(body.api_key)
    model, codes = service.models.translator(source=body.source, target=body.target)
    documents, count = [body.q] if isinstance(body.q, str) else body.q, 1 + body.alternatives
    found = await translate_documents(
        request,
        model,
        documents,
        DecodeConfig(beam=max(BEAM, count), n_best=count),
        codes,
        is_html=body.format == "html",
    )
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
