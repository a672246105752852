"""DeepL's API: /v2/translate."""

from typing import Any

from writehead.config import DecodeConfig
from writehead.serving.bodies import TextList, body_schema, read_body
from writehead.serving.documents import translate_documents
from writehead.serving.errors import error_answers
from writehead.serving.keys import key_in_header
from writehead.serving.models import AUTO
from writehead.serving.service import Service
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Request
    from pydantic import BaseModel

router = APIRouter(tags=["DeepL"])
SCHEME = "deepl-auth-key "


class DeeplBody(BaseModel):
    """The body of POST /v2/translate."""

    text: TextList
    target_lang: str
    source_lang: str | None = None


class DeeplTranslation(BaseModel):
    """One translation."""

    detected_source_language: str
    text: str


class DeeplAnswer(BaseModel):
    """The translations, in the order of the texts."""

    translations: list[DeeplTranslation]


class DeeplError(BaseModel):
    """The reason why a request failed."""

    message: str


@router.post(
    "/v2/translate",
    response_model=DeeplAnswer,
    responses=error_answers(DeeplError),
    openapi_extra=body_schema(DeeplBody),
)
async def translate(request: Request) -> dict[str, Any]:
    """Translates texts; lines of a text are translated one by one."""
    service: Service = request.app.state.service
    service.check_key(key_in_header(request, SCHEME))
    body = await read_body(request, DeeplBody, lists=("text",))
    model, codes, detected = await service.translator(
        request, body.text, body.source_lang or AUTO, body.target_lang
    )
    found = await translate_documents(request, model, body.text, DecodeConfig(), codes)
    known = model.languages[0] if model.languages else body.source_lang or ""
    source = known if detected is None else detected.language
    return {
        "translations": [
            {"detected_source_language": source.upper(), "text": texts[0]} for texts in found
        ]
    }
