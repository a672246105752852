"""LibreTranslate's API: /translate, /detect and /languages."""

from typing import Annotated, Any, Literal

from writehead.config import DecodeConfig
from writehead.engine.engine import BEAM
from writehead.serving.bodies import Texts, body_schema, read_body
from writehead.serving.detect import Detected
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


class DetectBody(BaseModel):
    """The body of POST /detect."""

    q: str = Field(description="Text.")
    api_key: str | None = None


class DetectedLanguage(BaseModel):
    """A language, and the confidence in it, from 0 to 100."""

    language: str
    confidence: float


class TranslateAnswer(BaseModel):
    """The translation, or a list of them, with alternatives if the request asks for any.

    If the source is auto, the detected language, which is the same for all texts of a list.
    """

    translatedText: str | list[str]
    detectedLanguage: DetectedLanguage | list[DetectedLanguage] | None = None
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
    documents, count = [body.q] if isinstance(body.q, str) else body.q, 1 + body.alternatives
    model, codes, source = await service.translator(request, documents, body.source, body.target)
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
    if source is not None:
        detected = _shown(source)
        answer["detectedLanguage"] = [detected] * len(documents) if is_list else detected
    if body.alternatives:
        answer["alternatives"] = others if is_list else others[0]
    return answer


@router.post(
    "/detect",
    response_model=list[DetectedLanguage],
    responses=error_answers(ErrorAnswer),
    openapi_extra=body_schema(DetectBody),
)
async def detect(request: Request) -> list[dict[str, Any]]:
    """Lists the likeliest language of a text, and others with a confidence of at least 1%."""
    service: Service = request.app.state.service
    body = await read_body(request, DetectBody)
    service.check_key(body.api_key)
    best, *others = await service.detect(request, [body.q])
    return [*map(_shown, [best, *(one for one in others if one.confidence >= 1.0)])]


@router.get("/languages", response_model=list[Language])
async def languages(request: Request) -> list[dict[str, object]]:
    """Lists the languages of all models."""
    service: Service = request.app.state.service
    return service.models.languages()


def _shown(detected: Detected) -> dict[str, Any]:
    return {"language": detected.language, "confidence": round(detected.confidence, 1)}
